"""Every link of a page or README to a file or a heading of this repository leads there."""

import re
from pathlib import Path

import pytest

from support.packaging.pages import CODE_BLOCK, ROOT, documents

LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(document: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(CODE_BLOCK.sub("", document.read_text())) if "://" not in link]
    for link in links:
        file, _, heading = link.partition("#")
        there = document.parent / file if file else document
        assert there.exists(), f"{link}: there is no {file}"
        assert not heading or heading in anchors(there), f"{link}: {there.relative_to(ROOT)} has no such heading"
