"""The pictures of a plan: well-formed, and every box where it belongs."""

import xml.etree.ElementTree as ElementTree

import pytest

from orca.planner.pictures.curves import draw
from orca.planner.pictures.timeline import Box, draw_timeline

SVG = "{http://www.w3.org/2000/svg}"


def test_a_box_for_each_step_of_each_stage() -> None:
    boxes = [
        Box(stage=0, start_s=10.0, end_s=12.0, is_encode=True, microbatch=0),
        Box(stage=1, start_s=12.0, end_s=14.0, is_encode=True, microbatch=0),
        Box(stage=0, start_s=14.0, end_s=15.0, is_encode=False, microbatch=1),
    ]
    root = ElementTree.fromstring(draw_timeline(boxes, title="A & B"))
    drawn = [each for each in root.iter(f"{SVG}rect") if each.get("class") in ("encode", "decode")][2:]
    assert [each.get("class") for each in drawn] == ["encode", "encode", "decode"]
    widths = [float(each.get("width", 0)) for each in drawn]
    assert widths[0] == pytest.approx(widths[1])
    assert widths[0] == pytest.approx(2 * widths[2], rel=0.01)
    places = [float(each.get("x", 0)) for each in drawn]
    assert places == sorted(places)
    labels = [each.text for each in root.iter(f"{SVG}text") if each.get("class") == "label"]
    assert labels == ["1", "1", "2"]


def test_a_timeline_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        draw_timeline([], title="empty")


def test_curves_are_well_formed() -> None:
    svg = draw({"rra": [(1.0, 2.0), (3.0, 5.0)], "iteration": [(1.5, 1.0)]}, title="t < u", x_title="x", y_title="y")
    root = ElementTree.fromstring(svg)
    assert len(list(root.iter(f"{SVG}g"))) == 2
