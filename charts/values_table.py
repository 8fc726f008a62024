"""Write the table of values in orca/README.md from orca/values.yaml: `python charts/values_table.py`.

The meaning of a value is the comment above it. A value without a comment is an error that names the value.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "orca"
BEGIN, END = "<!-- values: begin -->\n", "<!-- values: end -->\n"


@dataclass(frozen=True, slots=True)
class Value:
    """A row of the table: path with dots, default, and the comment above the value as one line."""

    path: str
    default: Any
    meaning: str


def main() -> None:
    readme = CHART / "README.md"
    values = read_values((CHART / "values.yaml").read_text())
    readme.write_text(with_table(readme.read_text(), values))


def read_values(text: str) -> list[Value]:
    """Return the leaves of a values.yaml in order. A mapping in braces is a leaf.

    Raises: ValueError that names the first value without a comment.
    """
    root = yaml.compose(text)
    return list(_leaves(root, "", text.splitlines())) if isinstance(root, yaml.MappingNode) else []


def with_table(readme: str, values: list[Value]) -> str:
    """Return `readme` with the table between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = "".join(f"| `{value.path}` | `{json.dumps(value.default)}` | {value.meaning} |\n" for value in values)
    return f"{before}{BEGIN}| Value | Default | Meaning |\n| --- | --- | --- |\n{rows}{END}{after}"


def _leaves(node: yaml.MappingNode, parent: str, lines: list[str]) -> Iterator[Value]:
    for key, value in node.value:
        path = f"{parent}{key.value}"
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _leaves(value, f"{path}.", lines)
            continue
        meaning = _comment_above(key.start_mark.line, lines)
        if not meaning:
            raise ValueError(f"{path} has no comment above it")
        yield Value(path, yaml.safe_load(yaml.serialize(value)), meaning)


def _comment_above(line: int, lines: list[str]) -> str:
    """Return the unbroken run of comment lines that ends above `line`, as one line."""
    words: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        words.insert(0, lines[line].strip().removeprefix("#").strip())
    return " ".join(words)


if __name__ == "__main__":
    main()
