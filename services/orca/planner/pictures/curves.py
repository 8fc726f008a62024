"""Curves as SVG, written by hand: readable on light and on dark pages, the same bytes on every machine."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 46, 56
_LEGEND_LINE = 20
_MARKS = ("circle", "square", "triangle", "diamond")

_STYLE = """
  <style>
    .page { fill: #ffffff; } .text { fill: #24292f; } .grid { stroke: #d0d7de; }
    .s0 { color: #0072b2; } .s1 { color: #c44e00; } .s2 { color: #00795a; } .s3 { color: #a0447f; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #161b22; } .text { fill: #e6edf3; } .grid { stroke: #3d444d; }
      .s0 { color: #56b4e9; } .s1 { color: #e69f00; } .s2 { color: #2bc59b; } .s3 { color: #e4a3c4; }
    }
    text { font: 13px system-ui, sans-serif; } .title { font-size: 15px; font-weight: 600; }
    .line { fill: none; stroke: currentColor; stroke-width: 2; } .mark { fill: currentColor; }
  </style>
"""

Point = tuple[float, float]
"""Coordinates of a point of a curve, in the units of the axes."""


def draw(
    curves: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_title: str,
    y_title: str,
    log: Sequence[str] = (),
    comment: str = "",
) -> str:
    """Return an SVG of some curves.

    Args:
        curves: their points, by the name in the legend.
        log: `x`, `y` or both: axes with a logarithmic scale. A linear axis begins at 0.
        comment: a line of the file for its readers.
    """
    if len(curves) > len(_MARKS):
        raise ValueError(f"{len(curves)} curves; readers cannot distinguish more than {len(_MARKS)}")
    top = _TOP + _LEGEND_LINE * math.ceil(len(curves) / 2)
    across = _Axis([x for points in curves.values() for x, _ in points], _LEFT, _WIDTH - _RIGHT, is_log="x" in log)
    up = _Axis([y for points in curves.values() for _, y in points], _HEIGHT - _BOTTOM, top, is_log="y" in log)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
            *([f"  <!-- {comment} -->"] if comment else []),
            f"  <title>{escape(title)}</title>{_STYLE.rstrip()}",
            f'  <rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>',
            _text(title, _LEFT, 26, name="text title"),
            *_grid(across, up),
            _text(x_title, (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, anchor="middle"),
            _text(y_title, 18, (top + _HEIGHT - _BOTTOM) / 2, anchor="middle", turn=True),
            *(line for number, curve in enumerate(curves.items()) for line in _curve(number, *curve, across, up)),
            "</svg>\n",
        ]
    )


class _Axis:
    """Maps the values of an axis to places on the picture."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, is_log: bool) -> None:
        self._start, self._end, self._is_log = start, end, is_log
        self.ticks = _log_ticks(min(values), max(values)) if is_log else _linear_ticks(max(values))
        self._low, self._high = self._scaled(self.ticks[0]), self._scaled(self.ticks[-1])

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._is_log else value

    def place(self, value: float) -> float:
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return round(self._start + share * (self._end - self._start), 1)


def _linear_ticks(highest: float) -> list[float]:
    """Return 0 and at most six equal steps up to the first one that is not below the highest value."""
    unit = 10.0 ** math.floor(math.log10(highest / 6))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor * 6 >= highest)
    return [round(step * number, 9) for number in range(math.ceil(highest / step - 1e-9) + 1)]


def _log_ticks(lowest: float, highest: float) -> list[float]:
    """Return the ones, twos and fives of each power of ten around the values."""
    powers = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    ticks = [round(digit * 10.0**power, 9) for power in powers for digit in (1, 2, 5)]
    first = max(number for number, tick in enumerate(ticks) if tick <= lowest)
    last = min(number for number, tick in enumerate(ticks) if tick >= highest)
    ticks = ticks[first : last + 1]
    if len(ticks) > 10:
        ticks = [tick for tick in ticks if math.log10(tick).is_integer() or tick in (ticks[0], ticks[-1])]
    return ticks


def _grid(across: _Axis, up: _Axis) -> list[str]:
    lines = []
    left, right = across.place(across.ticks[0]), across.place(across.ticks[-1])
    bottom, top = up.place(up.ticks[0]), up.place(up.ticks[-1])
    for tick in across.ticks:
        x = across.place(tick)
        lines.append(f'  <path class="grid" d="M{x} {bottom}V{top}"/>')
        lines.append(_text(f"{tick:,g}", x, bottom + 18, anchor="middle"))
    for tick in up.ticks:
        y = up.place(tick)
        lines.append(f'  <path class="grid" d="M{left} {y}H{right}"/>')
        lines.append(_text(f"{tick:,g}", left - 8, y + 4, anchor="end"))
    return lines


def _curve(number: int, name: str, points: Sequence[Point], across: _Axis, up: _Axis) -> list[str]:
    """Return the line, its marks and its place in the legend: two of these stand in a line."""
    places = [(across.place(x), up.place(y)) for x, y in points]
    shape = _MARKS[number]
    legend = _LEFT + 6 + (number % 2) * (_WIDTH - _LEFT - _RIGHT) / 2, _TOP + 2 + number // 2 * _LEGEND_LINE
    path = "".join(f"{command}{x} {y}" for command, (x, y) in zip(cycle("L"), places, strict=False))
    return [
        f'  <g class="s{number}">',
        f'    <path class="line" d="M{path[1:]}"/>',
        *(f"    {_mark(shape, x, y)}" for x, y in [*places, legend]),
        "  </g>",
        _text(name, legend[0] + 12, legend[1] + 4),
    ]


def _mark(shape: str, x: float, y: float) -> str:
    if shape == "circle":
        return f'<circle class="mark" cx="{x}" cy="{y}" r="4"/>'
    path = {"square": "m-4-4h8v8h-8z", "triangle": "m0-5l5 9h-10z", "diamond": "m0-5l5 5l-5 5l-5-5z"}[shape]
    return f'<path class="mark" d="M{x} {y}{path}"/>'


def _text(content: str, x: float, y: float, *, anchor: str = "start", name: str = "text", turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x} {y})"' if turn else ""
    return f'  <text class="{name}" x="{x}" y="{y}" text-anchor="{anchor}"{turned}>{escape(content)}</text>'
