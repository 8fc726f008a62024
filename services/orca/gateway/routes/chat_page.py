"""The page at `/`, on which people talk to the model. Its parts lie in the folder `page`.

The server joins them to one document, which loads nothing. So a browser makes one call for it, and its policy can name
exactly this script and this style.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path

from starlette.responses import Response

FOLDER = Path(__file__).with_name("page")
SCRIPTS = ("stream.js", "markdown.js", "answer.js", "conversation.js", "completion.js", "programs.js", "page.js")
"""Parts of one script, in this order: each runs after those that it uses at its start."""


@cache
def chat_page() -> Response:
    """Return the page. It loads nothing from elsewhere.

    Its policy allows its own script and style, and calls to this server. It also forbids the script to make HTML or
    code from text (Trusted Types): text of a model stays text.
    """
    style = _read("page.css")
    script = "\n".join(map(_read, SCRIPTS))
    page = _read("page.html").replace("<style></style>", f"<style>{style}</style>")
    page = page.replace("<script></script>", f"<script>{script}</script>")
    policy = (
        f"default-src 'none'; script-src '{_hash_of(script)}'; style-src '{_hash_of(style)}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "x-dns-prefetch-control": "off",  # a browser may look up the hosts of links, also of those in an answer
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(page, headers=headers, media_type="text/html")


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash_of(content: str) -> str:
    """Return the digest of an inline element as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
