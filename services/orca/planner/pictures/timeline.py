"""A timeline of stages as SVG, as Figure 4 of ExeGPT: a row for each stage, a box for each step, encode and decode."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 66, 46
_ROW, _GAP = 30, 8
_LEAST_FOR_TEXT = 12  # units of a box that holds a number

_STYLE = """
  <style>
    .page { fill: #ffffff; } .text { fill: #24292f; } .grid { stroke: #d0d7de; }
    .encode { fill: #9ecbe8; stroke: #0072b2; } .decode { fill: #f3b0a8; stroke: #b3341f; } .label { fill: #1b1f24; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #161b22; } .text { fill: #e6edf3; } .grid { stroke: #3d444d; }
    }
    text { font: 13px system-ui, sans-serif; } .title { font-size: 15px; font-weight: 600; }
    .label { font-size: 11px; }
  </style>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The time that one stage spends on one step, in seconds after the start of the picture."""

    stage: int
    start_s: float
    end_s: float
    is_encode: bool  # it runs prompts or sources; otherwise it is a decode iteration
    microbatch: int  # shown as a number from 1


def draw_timeline(boxes: Sequence[Box], *, title: str) -> str:
    """Return the picture of at least one box. Raises: ValueError if there is none."""
    if not boxes:
        raise ValueError("a timeline needs at least one step")
    stages = max(box.stage for box in boxes) + 1
    start_s, end_s = min(box.start_s for box in boxes), max(box.end_s for box in boxes)
    height = _TOP + stages * (_ROW + _GAP) + _BOTTOM
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end_s - start_s, 1e-9)

    def x(time_s: float) -> float:
        return round(_LEFT + (time_s - start_s) * scale, 2)

    def y(stage: int) -> int:
        return _TOP + stage * (_ROW + _GAP)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"  <title>{escape(title)}</title>{_STYLE.rstrip()}",
        f'  <rect class="page" width="{_WIDTH}" height="{height}" rx="6"/>',
        f'  <text class="text title" x="{_LEFT}" y="26">{escape(title)}</text>',
        *_legend(),
    ]
    for stage in range(stages):
        lines.append(f'  <text class="text" x="{_LEFT - 8}" y="{y(stage) + 20}" text-anchor="end">stage {stage}</text>')
        lines.append(f'  <path class="grid" d="M{_LEFT} {y(stage) + _ROW}H{_WIDTH - _RIGHT}"/>')
    for box in boxes:
        lines += _box(box, x(box.start_s), x(box.end_s), y(box.stage))
    bottom = y(stages) + 14
    lines.append(f'  <text class="text" x="{_LEFT}" y="{bottom}">0 s</text>')
    lines.append(
        f'  <text class="text" x="{_WIDTH - _RIGHT}" y="{bottom}" text-anchor="end">{end_s - start_s:.3g} s</text>'
    )
    return "\n".join([*lines, "</svg>\n"])


def _legend() -> list[str]:
    return [
        f'  <rect class="encode" x="{_LEFT}" y="40" width="14" height="14"/>',
        f'  <text class="text" x="{_LEFT + 20}" y="52">encode</text>',
        f'  <rect class="decode" x="{_LEFT + 96}" y="40" width="14" height="14"/>',
        f'  <text class="text" x="{_LEFT + 116}" y="52">decode; the numbers are micro-batches</text>',
    ]


def _box(box: Box, left: float, right: float, top: int) -> list[str]:
    width = round(right - left, 2)
    name = "encode" if box.is_encode else "decode"
    drawn = [f'  <rect class="{name}" x="{left}" y="{top}" width="{width}" height="{_ROW}"/>']
    if width >= _LEAST_FOR_TEXT:
        middle = round(left + width / 2, 2)
        drawn.append(
            f'  <text class="label" x="{middle}" y="{top + 19}" text-anchor="middle">{box.microbatch + 1}</text>'
        )
    return drawn
