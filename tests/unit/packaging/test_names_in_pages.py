"""Files and classes that a page or README names between backticks exist, also where the name is no link."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.packaging.pages import CODE_BLOCK, ROOT, documents

THIS = Path(__file__).relative_to(ROOT)
ROOMS = (".ci", ".github", "charts", "docs", "e2e", "kernels", "operator", "services", "tests")
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w$*<{./-])[\w./-]*\w\.(?:py|lua|md|proto|ya?ml)\b(?![\w*(-])")
CLASS = re.compile(r"\b[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+\b")
LINK = re.compile(r"\[`([^`\n]+)`\]\(([^)\s#]+)[^)]*\)")
MEASURED = re.compile(r"^- `.*commit [0-9a-f]{7}.*$", re.MULTILINE)
"""A command of a measurement. It ran at its commit, where files had other names."""
FOREIGN = {"PreferNoSchedule"}
"""Names of Kubernetes and of other programs that nothing of ours needs."""


@cache
def files() -> frozenset[str]:
    """Return the paths of the repository's files."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*") if "__pycache__" not in path.parts]
    return frozenset(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*"), *paths] if path.is_file())


@cache
def words() -> frozenset[str]:
    """Return the words of all code, schemas and manifests."""
    kinds = (".py", ".lua", ".proto", ".yaml", ".yml", ".tpl", ".go")
    texts = [(ROOT / name).read_text() for name in files() if name.endswith(kinds) and name != str(THIS)]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def missing(text: str) -> Iterator[str]:
    """Yield the names between backticks that are neither files of the repository nor words of its code."""
    for span in SPAN.findall(MEASURED.sub("", CODE_BLOCK.sub("", text))):
        for name in FILE.findall(span):
            if not any(file == name or file.endswith(f"/{name}") for file in files()):
                yield name
        for name in CLASS.findall(span) if re.fullmatch(r"[\w.]+(\(.*\))?", span) else ():
            if name not in words() | FOREIGN:
                yield name


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_files_and_classes_that_exist(document: Path) -> None:
    assert list(missing(document.read_text())) == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_name_of_a_file_in_a_link_is_the_end_of_its_path(document: Path) -> None:
    links = LINK.findall(CODE_BLOCK.sub("", document.read_text()))
    named = [(name, target) for name, target in links if FILE.fullmatch(name)]
    assert [(name, target) for name, target in named if not f"/{target}".endswith(f"/{name}")] == []


@pytest.mark.parametrize(
    "text", ["`no_such_file.py`", "see `scheduler/no_such.lua`", "`NoSuchClass`", "`NoSuchClass(1)`"]
)
def test_a_name_that_nothing_has_is_found(text: str) -> None:
    assert len(list(missing(text))) == 1


@pytest.mark.parametrize(
    "text", ["`test_names_in_pages.py`", "`packaging/test_links.py`", "`OrcaDeployment`", "`*.py`"]
)
def test_a_name_that_something_has_is_allowed(text: str) -> None:
    assert list(missing(text)) == []
