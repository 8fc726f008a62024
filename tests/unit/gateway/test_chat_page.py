"""The page at `/` as the gateway serves it. tests/process has its behaviour in a browser."""

import base64
import hashlib
import re

from orca.gateway.routes.chat_page import FOLDER, SCRIPTS
from support.gateway.gateway_rig import rig


async def test_the_page_loads_nothing_and_its_policy_allows_only_its_own_parts() -> None:
    async with rig(schedules=False) as one:
        response = await one.client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in response.headers["content-security-policy"]
    for tag in ("script", "style"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    html = re.sub("<(script|style)>.*?</\\1>", "", response.text, flags=re.DOTALL)
    assert not re.search(r"https?://|\ssrc=|\shref=|\son\w+=|\sstyle=", html)
    assert response.headers["x-dns-prefetch-control"] == "off"


def test_each_script_of_the_page_is_served_and_none_makes_html_or_code_of_text() -> None:
    assert {path.name for path in FOLDER.glob("*.js")} == set(SCRIPTS)
    source = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|</script", source)
