"""The pages and READMEs of this repository."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_ROOMS = ("docs", ".github", "services", "operator", "charts", "kernels", "tests", "e2e")


def documents() -> list[Path]:
    """Return the paths of all pages and READMEs, in order."""
    return sorted([*ROOT.glob("*.md"), *(path for room in _ROOMS for path in (ROOT / room).rglob("*.md"))])
