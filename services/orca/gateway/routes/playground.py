"""One page to type a prompt and watch the tokens come. Self-contained: nothing is loaded from anywhere."""

import base64
import hashlib
from functools import cache
from pathlib import Path

from starlette.responses import Response


@cache
def playground() -> Response:
    """The page, with a policy that allows exactly its own script and style and calls to this server."""
    page = Path(__file__).with_name("playground.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src '{_hash_of(page, 'script')}'; style-src '{_hash_of(page, 'style')}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(page, headers=headers, media_type="text/html")


def _hash_of(page: str, tag: str) -> str:
    """The inline element's digest, as a Content-Security-Policy names it."""
    content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
