"""Hooks of the documentation site: pages that are found in their folder, and links that leave docs/."""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOUND = {"Benchmarks": "benchmarks", "Decisions": "decisions"}
"""Sections of the navigation that list the pages of a folder by name."""
CODE_HOST = os.environ.get("ORCA_DOCS_SOURCE", "").rstrip("/")
"""URL of a folder that shows this repository's files, such as https://host/owner/orca/blob/COMMIT. Without it, a link
to a file outside docs/ becomes the file's path, without a link."""
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s]*)\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    for title, folder in FOUND.items():
        pages = sorted((ROOT / "docs" / folder).glob("*.md"), key=lambda page: (page.name != "index.md", page.name))
        if pages:
            config.nav.append({title: [{_title(page): f"{folder}/{page.name}"} for page in pages]})
    return config


def _title(page: Path) -> str:
    """Return the first heading. MkDocs finds none below a comment, as generated pages have one."""
    found = re.search(r"^# (.*)$", page.read_text(), re.MULTILINE)
    return found[1] if found else page.stem


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/. Raises: FileNotFoundError for one that leads nowhere."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replaced(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {path}, which does not exist")
        if CODE_HOST:
            return f"[{text}]({CODE_HOST}/{path})"
        names_itself = text.startswith("`") or path.startswith(text)
        return text if names_itself else f"{text} (`{path}`)"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)
