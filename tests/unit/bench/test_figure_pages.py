"""Templates, tables, plots and the README's figures."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

from orca.bench.figures.figure import Figure, FiguresError, parse
from orca.bench.figures.pages import BEGIN, END, fill_readme, make_pages
from orca.bench.figures.plot import draw
from orca.bench.figures.query import Results

HEAD = '"date": "2026-11-27", "commit": "ff304a1"'


def line(what: str, value: float, settings: str, *, unit: str = "tokens/s", command: str = "bench") -> Figure:
    """Build a figure. Args: settings: JSON without its braces."""
    return parse(
        f'{{"what": "{what}", "settings": {{{settings}}}, "value": {value}, "unit": "{unit}", "spread": null, '
        f'"runs": 1, "processor": "one", {HEAD}, "command": "{command}"}}'
    )


SPEEDS = [
    line("Speed", 400, '"system": "theirs", "batch": 1'),
    line("Speed", 500, '"system": "ours", "batch": 1'),
    line("Speed", 1200, '"system": "ours", "batch": 16'),
    line("Delay", 7.5, '"system": "ours", "batch": 16', unit="ms"),
]


def page(text: str, tmp_path: Path, figures: Sequence[Figure] = SPEEDS) -> str:
    """Return the page that a template makes."""
    (tmp_path / "subject.md.template").write_text(text)
    return make_pages(Results({"host": figures}), tmp_path)["subject.md"]


def rows(text: str, tmp_path: Path, figures: Sequence[Figure] = SPEEDS) -> list[list[str]]:
    """Return the cells of the table on a page, without its line of dashes."""
    table = [row.split("|")[1:-1] for row in page(text, tmp_path, figures).splitlines() if row.startswith("|")]
    return [[cell.strip() for cell in row] for row in [table[0], *table[2:]]]


def test_a_placeholder_is_one_figure_and_a_sum_is_several(tmp_path: Path) -> None:
    text = "{{ host: Speed; system = ours; batch = 16; show = unit }} and {{ sum host: Speed; batch = 1 }}"
    assert page(text, tmp_path).endswith("1,200 tokens/s and 900")


def test_a_changed_figure_changes_the_page(tmp_path: Path) -> None:
    text = "{{ host: Delay }}"
    changed = [*SPEEDS, line("Delay", 8.5, '"system": "ours", "batch": 16', unit="ms")]
    assert page(text, tmp_path).endswith("7.5")
    assert page(text, tmp_path, changed).endswith("8.5")


def test_a_block_without_figures_shows_what_it_says_or_is_an_error(tmp_path: Path) -> None:
    block = "```table host\nwhat: No such figure\nrows: system\n%s```\n"
    assert page(block % "absent: Not measured yet.\n", tmp_path).endswith("Not measured yet.\n")
    with pytest.raises(FiguresError, match="No such figure"):
        page(block % "", tmp_path)


def test_a_table_has_a_row_and_a_column_for_each_setting(tmp_path: Path) -> None:
    text = "```table host\nwhat: Speed\nrows: system\ncolumns: batch\n```\n"
    assert rows(text, tmp_path) == [
        ["System", "Batch 1", "Batch 16"],
        ["theirs", "400", "-"],
        ["ours", "500", "1,200"],
    ]


def test_a_table_says_what_it_shows_and_how_it_was_measured(tmp_path: Path) -> None:
    text = page("```table host\nwhat: Speed\nrows: system\ncolumns: batch\n```\n", tmp_path)
    assert "**Speed**, in tokens/s:" in text
    assert "- `bench` (one, 2026-11-27, commit ff304a1, 1 run)" in text


def test_columns_of_several_figures_name_their_units(tmp_path: Path) -> None:
    text = "```table host\nwhat: Speed | Delay\nwhere: batch = 16\nrows: system\ncolumns: what\n```\n"
    assert rows(text, tmp_path) == [["System", "Speed (tokens/s)", "Delay (ms)"], ["ours", "1,200", "7.5"]]


def test_rows_have_the_order_of_the_template(tmp_path: Path) -> None:
    text = "```table host\nwhat: Speed\nwhere: system = ours | theirs\nwhere: batch = 1\nrows: system\n```\n"
    assert [row[0] for row in rows(text, tmp_path)] == ["System", "ours", "theirs"]


def test_only_figures_of_one_run_are_divided(tmp_path: Path) -> None:
    text = "```table host\nwhat: Speed\nwhere: batch = 1\nrows: system\ncompare: system = theirs\n```\n"
    assert rows(text, tmp_path)[2] == ["ours", "500; 1.25x"]
    apart = [SPEEDS[0], line("Speed", 500, '"system": "ours", "batch": 1', command="bench again")]
    assert rows(text, tmp_path, apart)[2] == ["ours", "500"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n{{ host: No such figure }}", ":2: no figure of host answers 'No such figure'"),
        ("{{ Speed }}", ":1: a placeholder is `bench: what; key = value`"),
        ("{{ host: Speed }}", ":1: 3 figures answer"),
        ("{{ host: Delay; show = colour }}", ":1: show is one of value, range, unit, not 'colour'"),
        ("{{ host: Delay; batch 16 }}", ":1: a condition is `key = value`, not ' batch 16 '"),
        ("```table host\nrows: system\n```\n", ":1: a block needs a line `what: ...`"),
        ("```table host\nwhat: Speed\ncolour: red\n```\n", ":1: unknown line 'colour: red'"),
        ("```table host name\nwhat: Speed\n```\n", ":1: a plot needs a name of its file, a table has none"),
        ("```table host\nwhat: Speed\nrows: system\n```\n", ":1: two figures for"),
        ("```plot host p\nwhat: Speed\nx: system\n```\n", ":1: Speed, {'system': 'theirs', 'batch': 1}: there is no"),
    ],
)
def test_a_wrong_template_is_refused_with_its_line(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(FiguresError) as raised:
        page(text, tmp_path)
    assert str(raised.value).startswith(f"subject.md.template{complaint}")


def test_a_plot_is_a_file_beside_the_page(tmp_path: Path) -> None:
    text = "```plot host speed\ntitle: A & B\nwhat: Speed\nwhere: system = ours\nx: batch\nlines: system\n```\n"
    (tmp_path / "subject.md.template").write_text(text)
    files = make_pages(Results({"host": SPEEDS}), tmp_path)
    assert "![A & B](plots/speed.svg)" in files["subject.md"]
    picture = ElementTree.fromstring(files["plots/speed.svg"])
    texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "ours", "Batch", "Speed (tokens/s)"} <= set(texts)


def test_both_coordinates_of_a_curve_may_be_figures(tmp_path: Path) -> None:
    text = "```plot host p\nwhat: Delay\nwhere: batch = 16\nx: Speed\nlines: system\n```\n"
    (tmp_path / "subject.md.template").write_text(text)
    assert "Speed (tokens/s)" in make_pages(Results({"host": SPEEDS}), tmp_path)["plots/p.svg"]


def test_a_plot_is_readable_in_light_and_dark_mode_and_reproducible() -> None:
    curves = {"a": [(1, 10), (1000, 20)], "b": [(2, 5), (500, 40)]}
    svg = draw(curves, title="T", x_title="x", y_title="y", log=["x"])
    assert "prefers-color-scheme: dark" in svg
    assert svg == draw(curves, title="T", x_title="x", y_title="y", log=["x"])


def test_more_curves_than_distinct_colours_are_refused() -> None:
    with pytest.raises(ValueError, match="5 curves"):
        draw({name: [(1, 1), (2, 2)] for name in "abcde"}, title="T", x_title="x", y_title="y")


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    (tmp_path / "readme.md.template").write_text("Speed: {{ host: Speed; system = theirs }}\n")
    return tmp_path


def test_the_readme_gets_its_figures_between_the_markers(templates: Path) -> None:
    readme = f"# Orca\n\n{BEGIN}\nold\n{END}\n\nMore.\n"
    filled = fill_readme(readme, Results({"host": SPEEDS}), templates)
    assert filled == f"# Orca\n\n{BEGIN}\nSpeed: 400\n{END}\n\nMore.\n"
    assert fill_readme(filled, Results({"host": SPEEDS}), templates) == filled


def test_a_readme_without_markers_stays_as_it_is(templates: Path) -> None:
    assert fill_readme("# Orca\n", Results({"host": SPEEDS}), templates) == "# Orca\n"


@pytest.mark.parametrize("readme", [f"{BEGIN}\n", f"{END}\n", f"{END}\n{BEGIN}\n"])
def test_a_readme_needs_both_markers_in_order(readme: str, templates: Path) -> None:
    with pytest.raises(FiguresError, match="the README needs both"):
        fill_readme(readme, Results({"host": SPEEDS}), templates)
