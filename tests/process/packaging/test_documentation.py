"""The README is short, the glossary names what the code has, and pages load nothing from elsewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GLOSSARY = ROOT / "docs" / "concepts" / "glossary.md"
PRODUCT = ("services", "operator", "kernels")
SOURCES = ("*.py", "*.lua", "*.proto")
README_WORDS_MAX = 900


def identifiers() -> list[str]:
    """Return what the glossary says to be in the code, without placeholders such as <id>."""
    lines = re.findall(r"In the code: (.*)", GLOSSARY.read_text())
    return sorted({re.split(r":<", name)[0] for line in lines for name in re.findall(r"`([^`]+)`", line)})


@pytest.fixture(scope="module")
def code() -> str:
    paths = [path for room in PRODUCT for kind in SOURCES for path in (ROOT / room).rglob(kind)]
    return "\n".join([*map(str, paths), *(path.read_text() for path in paths)])


def test_the_glossary_names_some_identifiers() -> None:
    assert len(identifiers()) > 40


@pytest.mark.parametrize("name", identifiers())
def test_an_identifier_of_the_glossary_is_in_the_code(name: str, code: str) -> None:
    assert re.search(rf"\b{re.escape(name)}\b", code), f"docs/concepts/glossary.md names {name}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS_MAX


def test_a_page_embeds_no_picture_of_another_host() -> None:
    shown = [
        (path.name, link)
        for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for link in re.findall(r"!\[[^\]]*\]\((https?:[^)]+)\)|<img[^>]+src=\"(https?:[^\"]+)\"", path.read_text())
    ]
    assert shown == []
