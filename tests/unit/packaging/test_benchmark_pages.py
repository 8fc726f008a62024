"""docs/benchmarks and the README's figures are what the results and the templates make."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from orca.bench.figures.__main__ import main
from orca.bench.figures.figure import read_results
from orca.bench.figures.pages import BEGIN, END, GENERATED, make_pages
from orca.bench.figures.query import Results

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
CELL_MAX = 75


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a README that has the markers, and pages that are current."""
    (tmp_path / "README.md").write_text(f"# Orca\n\n{BEGIN}\n{END}\n")
    assert main([], tmp_path) == 0
    return tmp_path


def test_the_pages_are_current() -> None:
    assert main(["--check"]) == 0


def test_every_figure_is_on_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Orca\n")
    assert main([], tmp_path) == 0
    assert capsys.readouterr().out == ""


def test_a_changed_figure_changes_its_page() -> None:
    before = read_results()
    after = {**before, "start": [replace(figure, value=99.5, spread=None) for figure in before["start"]]}
    pages, changed = make_pages(Results(before)), make_pages(Results(after))
    assert [name for name in pages if pages[name] != changed[name]] == ["one-machine.md"]


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks/faults.md", "docs/benchmarks/plots/chunks-gap.svg"])
def test_a_file_that_was_edited_is_named_and_written_again(
    name: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check"], checkout) == 0
    file = checkout / name
    current = file.read_text()
    file.write_text(current.replace(END, f"edited\n{END}") if name == "README.md" else current + "edited\n")
    assert main(["--check"], checkout) == 1
    assert capsys.readouterr().err == f"{name} is not current; run: make figures\n"
    assert main([], checkout) == 0
    assert file.read_text() == current


def test_a_page_without_a_template_is_removed_and_others_stay(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, by_hand = checkout / "docs/benchmarks/old.md", checkout / "docs/benchmarks/by-hand.md"
    old.write_text(f"<!-- {GENERATED} from a template. -->\n")
    by_hand.write_text("# Something else\n")
    assert main(["--check"], checkout) == 1
    assert "docs/benchmarks/old.md is not current" in capsys.readouterr().err
    assert main([], checkout) == 0
    assert not old.exists()
    assert by_hand.exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_cells_are_short(page: Path) -> None:
    rows = [line.split("|")[1:-1] for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [re.sub(r"\]\([^)]*\)", "]", cell).strip() for row in rows for cell in row]
    assert [cell for cell in cells if len(cell) > CELL_MAX and page.name != "index.md"] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, heading = link.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), link
        headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if heading else []
        slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
        assert not heading or heading in slugs, link
