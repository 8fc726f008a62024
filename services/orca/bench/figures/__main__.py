"""Writes the benchmark pages and the README's figures: `python -m orca.bench.figures`, or `make figures`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from orca.bench.figures.figure import FiguresError, read_results
from orca.bench.figures.pages import GENERATED, fill_readme, make_pages
from orca.bench.figures.query import Results

_CHECKOUT = Path(__file__).parents[4]


def main(argv: Sequence[str] | None = None, checkout: Path = _CHECKOUT) -> int:
    """Write the pages, or check them. Returns: 1 if a page is not current or a figure is wrong, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m orca.bench.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is not current")
    options = parser.parse_args(argv)
    try:
        results = Results(read_results())
        wanted = _wanted(results, checkout)
    except FiguresError as error:
        print(error, file=sys.stderr)
        return 1
    folder = checkout / "docs" / "benchmarks"
    stale = [file for file, text in wanted.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    stray = [
        file
        for file in [*folder.glob("*.md"), *folder.glob("plots/*.svg")]
        if file not in wanted and GENERATED in file.read_text(encoding="utf-8")
    ]
    if options.check:
        for file in [*stale, *stray]:
            print(f"{file.relative_to(checkout)} is not current; run: make figures", file=sys.stderr)
        return 1 if stale or stray else 0
    for file in stale:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(wanted[file], encoding="utf-8")
    for file in stray:
        file.unlink()
    for figure in results.unused:
        print(f"on no page: {figure}")
    return 0


def _wanted(results: Results, checkout: Path) -> dict[Path, str]:
    """Return what each generated file must hold."""
    pages = {checkout / "docs" / "benchmarks" / name: text for name, text in make_pages(results).items()}
    readme = checkout / "README.md"
    return pages | {readme: fill_readme(readme.read_text(encoding="utf-8"), results)}


if __name__ == "__main__":
    sys.exit(main())
