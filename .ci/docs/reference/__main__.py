"""Write the pages of docs/reference from the code: `make reference`. With --check, only compare them."""

import sys
from pathlib import Path

from reference import chart_page, error_page, http_page, metric_page, option_page, resource_page

FOLDER = Path(__file__).parents[3] / "docs" / "reference"
PAGES = {
    "cli.md": option_page.page,
    "orcadeployment.md": resource_page.page,
    "chart-values.md": chart_page.page,
    "metrics.md": metric_page.page,
    "errors.md": error_page.page,
    "http-api.md": http_page.page,
}
NOTE = "<!-- Generated from the code by `make reference`. Do not edit. -->\n\n"


def main() -> int:
    """Return 0, or 1 when a page is not what the code says."""
    is_check = sys.argv[1:] == ["--check"]
    stale = []
    for name, page in PAGES.items():
        path, text = FOLDER / name, NOTE + page().rstrip() + "\n"
        if path.exists() and path.read_text() == text:
            continue
        stale.append(f"docs/reference/{name}")
        if not is_check:
            path.write_text(text)
    if stale:
        print(
            f"not what the code says: {', '.join(stale)}; run: make reference"
            if is_check
            else f"wrote {', '.join(stale)}"
        )
    return 1 if stale and is_check else 0


if __name__ == "__main__":
    sys.exit(main())
