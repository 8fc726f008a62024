"""Computes the tables of a profile from the times of steps. Pure.

Each round has timed every point once. Differences are taken inside a round, so a machine that is slower for some
seconds changes both sides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from orca.planner.profile.measuring import points
from orca.planner.profile.measuring.points import Point, PointBounds, View
from orca.planner.profile.measuring.process_order import ProcessFacts, StepTime, WeightBytes
from orca.planner.profile.profile import Curve, DegreeTimes, MeasuredTime, StackTimes, Surface
from orca.planner.profile.tables import Line

_STEP_ROWS = (1, 2, 4, 8, 16, 32, 64)

Series = Sequence[float]
"""Microseconds of each round."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The times of all rounds of one tensor degree. Points that were too slow are missing."""

    bounds: PointBounds
    facts: ProcessFacts
    times: Mapping[Point, Sequence[StepTime]]

    def __contains__(self, point: Point) -> bool:
        return point in self.times

    def total(self, point: Point) -> Series:
        return [each.total_us for each in self.times[point]]

    def compute(self, point: Point) -> Series:
        return [each.compute_us for each in self.times[point]]


def degree_times(rounds: Rounds, *, encoder_layers: int) -> DegreeTimes:
    """Return the times of a tensor degree. Args: encoder_layers: 0 for a decoder-only model."""
    bounds, facts = rounds.bounds, rounds.facts
    embed = _embed(rounds)
    step = _step(rounds, embed.line())
    decoder = _Layers(rounds, facts.layers, step.line(), embed.line())
    stacks = [_decoder_times(decoder, has_encoder=bool(encoder_layers))]
    if encoder_layers:
        stacks.insert(0, _encoder_times(_Layers(rounds, encoder_layers, step.line(), embed.line())))
    weights = facts.weights or WeightBytes(layers=(0,) * len(stacks), embed=0, head=0)
    all_reduce = points.link_points(bounds, View.ALL_REDUCE)
    return DegreeTimes(
        ranks=bounds.ranks,
        stacks=tuple(stacks),
        step=step,
        embed=embed,
        head=_head(rounds),
        all_reduce=_curve({size: rounds.total(point) for size, point in all_reduce.items()}) if all_reduce else None,
        weight_bytes_per_layer=weights.layers,
        embed_bytes=weights.embed,
        head_bytes=weights.head,
        kv_bytes_per_slot=facts.kv_bytes_per_slot,
    )


def send_times(rounds: Rounds) -> Curve | None:
    """Return the time of a message by its bytes; None if none was sent."""
    sends = points.link_points(rounds.bounds, View.SEND)
    return _curve({size: rounds.total(point) for size, point in sends.items()}) if sends else None


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of one stack: what is left of a step without its fixed time and its embedding, divided by them."""

    rounds: Rounds
    count: int
    step: Line
    embed: Line

    def each(self, point: Point) -> Series:
        """Return the time of one layer."""
        other = self.step(point.rows) + self.embed(point.tokens)
        return [(us - other) / self.count for us in self.rounds.total(point)]

    def more(self, point: Point, than: Point) -> Series:
        """Return what one layer takes longer in a step than in another one."""
        return [us - other for us, other in zip(self.each(point), self.each(than), strict=True)]


def _decoder_times(layers: _Layers, *, has_encoder: bool) -> StackTimes:
    rounds, bounds = layers.rounds, layers.rounds.bounds
    rest = {rows: points.rest_point(rows, bounds) for rows in points.rest_rows(bounds)}
    rest = {rows: point for rows, point in rest.items() if point in rounds}

    def attention(found: Mapping[int, Mapping[int, Point]], at_one: int) -> Surface:
        """Return what attention adds, which is nothing at the least length. Args: at_one: this length."""
        curves = {}
        for rows, by_length in found.items():
            series = {
                length: layers.more(point, rest[rows])
                for length, point in by_length.items()
                if point in rounds and length > at_one
            }
            if series:
                nothing = [0.0] * len(next(iter(series.values())))
                curves[rows] = _curve({at_one: nothing, **series})
        return Surface(at=tuple(curves), curves=tuple(curves.values()))

    prompts = {
        count: _curve({start: layers.more(point, rest[count]) for start, point in by_start.items() if point in rounds})
        for count, by_start in points.prompt_points(bounds).items()
        if count in rest and by_start[0] in rounds
    }
    cross = attention(points.cross_points(bounds), 1) if has_encoder else None
    return StackTimes(
        rest=_curve({rows: layers.each(point) for rows, point in rest.items()}),
        prompts=Surface(at=tuple(prompts), curves=tuple(prompts.values())),
        increments=attention(points.increment_points(bounds), 1),
        keep=_keep(layers),
        cross=cross,
        memory=None if cross is None else _memory(layers, cross, rest),
    )


def _encoder_times(layers: _Layers) -> StackTimes:
    rounds, bounds = layers.rounds, layers.rounds.bounds
    rest = {rows: points.rest_point(rows, bounds, View.ENCODER) for rows in points.source_rows(bounds)}
    rest = {rows: point for rows, point in rest.items() if point in rounds}
    line = _curve({rows: layers.each(point) for rows, point in rest.items()})
    sources = {}
    for count, point in points.source_points(bounds).items():
        if point in rounds:
            base = layers.each(rest[count]) if count in rest else [line.line()(count)] * len(layers.each(point))
            longer = [us - other for us, other in zip(layers.each(point), base, strict=True)]
            sources[count] = _curve({0: longer})
    return StackTimes(
        rest=line,
        prompts=Surface(at=tuple(sources), curves=tuple(sources.values())),
        increments=None,
        keep=None,
        cross=None,
        memory=None,
    )


def _memory(layers: _Layers, cross: Surface, rest: Mapping[int, Point]) -> Curve:
    """Return what new sources add to a layer of the decoder: their keys and values, and a step that is laid out."""
    read, found = cross.grid(), {}
    rest_line = _curve({rows: layers.each(point) for rows, point in rest.items()}).line()
    for tokens, point in points.memory_points(layers.rounds.bounds).items():
        if point in layers.rounds:
            other = rest_line(point.rows) + read(point.rows, point.source)
            found[tokens] = [us - other for us in layers.each(point)]
    return _curve(found)


def _keep(layers: _Layers) -> Curve:
    """Return the time of a last layer that only writes keys and values."""
    found = {}
    for count, point in points.kept_points(layers.rounds.bounds).items():
        if point in layers.rounds:
            other = layers.step(point.rows) + layers.embed(point.tokens)
            found[count] = [us - other for us in layers.rounds.total(point)]
    return _curve(found)


def _head(rounds: Rounds) -> Curve:
    found = {}
    for rows, point in points.headed_points(rounds.bounds).items():
        without = points.rest_point(rows, rounds.bounds)
        if point in rounds and without in rounds:
            found[rows] = [us - other for us, other in zip(rounds.total(point), rounds.total(without), strict=True)]
    return _curve(found)


def _embed(rounds: Rounds) -> Curve:
    bare = points.embedding_points(rounds.bounds, View.BARE)
    return _curve(
        {
            rows: [us - other for us, other in zip(rounds.total(point), rounds.total(bare[rows]), strict=True)]
            for rows, point in points.embedding_points(rounds.bounds, View.EMBEDDED).items()
            if point in rounds and bare[rows] in rounds
        }
    )


def _step(rounds: Rounds, embed: Line) -> Curve:
    """Return what a stage takes besides its layers: Python around the computation, and the computation's own start.

    The start follows from stages of different layer counts.
    """
    whole, fewer = rounds.facts.layers, rounds.facts.fewer_layers
    starts = []
    if fewer:
        for rows, point in points.fewer_points(rounds.bounds).items():
            longer, shorter = (median(rounds.compute(each)) for each in (points.rest_point(rows, rounds.bounds), point))
            starts.append((whole * shorter - fewer * longer) / (whole - fewer) - embed(rows))
    # One layer takes no less than its start. Only on a machine that others use does the difference say so.
    least = median(rounds.compute(points.rest_point(1, rounds.bounds, View.BARE)))
    start = min(max(0.0, median(starts)), least) if starts else 0.0
    found = {}
    for rows in _STEP_ROWS:
        point = points.rest_point(rows, rounds.bounds)
        if point in rounds:
            found[rows] = [each.total_us - each.compute_us + start for each in rounds.times[point]]
    return _curve(found)


def _curve(series: Mapping[int, Series]) -> Curve:
    return Curve(at=tuple(series), times=tuple(_measured(each) for each in series.values()))


def _measured(series: Iterable[float]) -> MeasuredTime:
    values = sorted(round(each, 3) for each in series)
    if len(values) == 1:
        values *= 2
        repeats = 1
    else:
        repeats = len(values)
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return MeasuredTime(us=round(middle, 3), low_us=round(low, 3), high_us=round(high, 3), repeats=repeats)
