"""The steps that a profile times: which part of the model runs them, and their rows. Pure.

A layer's `rest` is a step whose attention reads nothing but the row itself, or a few tokens. Attention is what longer
contexts add to it. The head is what the same step takes longer where it is sampled from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from orca.core.domain.encoder_decoder import SOURCE_SLOTS_MAX
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, slots_needed


class View(StrEnum):
    """The part of a model that runs a step, or a link between ranks."""

    ENCODER = "encoder"  # all encoder layers with their embedding
    LAYERS = "layers"  # embedding and all layers of the decoder, or of a model's only stack
    FEWER = "fewer"  # the same with half of the layers
    HEADED = "headed"  # all layers and the head
    KEPT = "kept"  # embedding, one layer and the head
    EMBEDDED = "embedded"  # embedding and one layer
    BARE = "bare"  # one layer
    ALL_REDUCE = "all_reduce"
    SEND = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A step of equal rows, or a message of so many bytes."""

    view: View
    rows: int = 0  # requests of the step
    count: int = 1  # tokens of each row
    start: int = 0  # position of the first one
    source: int = 0  # of an encoder-decoder model: source tokens of each request
    enters: bool = False  # the requests are new in this step
    samples: bool = True  # a token is drawn for each row, if the view has the head
    size: int = 0  # bytes of a message

    @property
    def tokens(self) -> int:
        """Rows of the flat tensor, or of the encoder's."""
        return self.rows * (self.source if self.view is View.ENCODER else self.count)

    @property
    def is_link(self) -> bool:
        return self.view in (View.ALL_REDUCE, View.SEND)

    @property
    def brings_sources(self) -> bool:
        """Return whether only its first step runs the sources of its requests, which the others read."""
        return self.source > 1 and not self.enters and self.view is not View.ENCODER

    @property
    def slots(self) -> int:
        """KV slots that its requests need, with one more token for each."""
        own = slots_needed(self.start + self.count + 1, DEFAULT_BLOCK_TOKENS)
        return self.rows * (own + slots_needed(self.source, DEFAULT_BLOCK_TOKENS))

    @property
    def is_small(self) -> bool:
        """Return whether it is measured even if time is short: each table needs its first places."""
        return self.tokens <= SHORT and self.rows * self.source <= 4 * SHORT and self.start <= 128

    @property
    def work(self) -> int:
        """A number by which points are ordered: cheap ones first."""
        reads = self.rows * self.count * (self.start + self.count + self.source)
        return 64 * (self.tokens + self.rows * self.source * self.enters) + reads // 16 + self.size // 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PointBounds:
    """The largest steps that are measured."""

    positions: int  # tokens of a prompt and its output, or of a target
    source_positions: int | None  # tokens of a source; None: a decoder-only model
    slots: int  # KV slots of a process
    row_bytes: int  # of a row of activations
    ranks: int  # of a stage
    sends: bool  # there is a second process to send to


SINGLE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows of `rest` that have one token each."""
SHORT = 16
"""Tokens of each row where `rest` has more rows than that: they fill a KV block."""
MANY_ROWS = (96, 128, 192, 256, 384, 512, 1024)
COUNTS = (2, 16, 64, 128, 192, 256, 384, 512, 1024)
"""Tokens of a prompt, or of a chunk."""
_LATER_START = 768
"""Start of a later chunk, if the model's texts are so long. Attention is linear in the start."""
_KEPT_COUNTS = (2, 16, 64, 256, 512)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (64, 512, 1536)
_SOURCES = (16, 64, 128, 256, 512)
_EMBEDDED = (1, 16, 64, 256)
_FEWER = (1, 2, 4, 8, 16)
_MESSAGE_ROWS = (1, 4, 16, 64, 256, 1024)
POSITIONS_MIN = 8
"""Least tokens of prompt and output of a model that can be profiled."""


def rest_point(rows: int, bounds: PointBounds, view: View = View.LAYERS) -> Point:
    """Return the step of so many rows in which attention has nothing to read."""
    is_encoder = view is View.ENCODER
    if is_encoder:
        each = min(rows, SHORT)
        return Point(view=view, rows=rows // each, source=each, enters=True, samples=False)
    source = 0 if bounds.source_positions is None else 1
    if rows <= SINGLE_ROWS[-1]:
        return Point(view=view, rows=rows, source=source)
    return Point(view=view, rows=rows // SHORT, count=SHORT, source=source, enters=True, samples=False)


def rest_rows(bounds: PointBounds) -> tuple[int, ...]:
    """Return the numbers of rows at which `rest` is measured."""
    return SINGLE_ROWS + tuple(rows for rows in MANY_ROWS if rows <= max(bounds.positions, 128))


def source_rows(bounds: PointBounds) -> tuple[int, ...]:
    """Return the same for the encoder. Sources of one step may be longer together than one is."""
    most = 0 if bounds.source_positions is None else min(SOURCE_SLOTS_MAX, max(bounds.source_positions, 128))
    return tuple(rows for rows in (1, 2, 4, 8, 16, 32, 64, *MANY_ROWS) if rows <= most)


def prompt_points(bounds: PointBounds) -> dict[int, dict[int, Point]]:
    """Return one row of several tokens: by its tokens, then by its start."""
    longest = bounds.positions - 1
    found: dict[int, dict[int, Point]] = {}
    source = 0 if bounds.source_positions is None else 1
    for count in COUNTS:
        if count > min(longest, rest_rows(bounds)[-1]):
            continue
        later = min(_LATER_START, longest - count) // SHORT * SHORT
        points = {
            start: Point(
                view=View.LAYERS, rows=1, count=count, start=start, source=source, enters=not start, samples=False
            )
            for start in sorted({0, later})
        }
        found[count] = {start: point for start, point in points.items() if point.slots <= bounds.slots}
    return {count: points for count, points in found.items() if 0 in points}


def source_points(bounds: PointBounds) -> dict[int, Point]:
    """Return one source of several tokens, by its tokens."""
    assert bounds.source_positions is not None
    longest = min(bounds.source_positions, source_rows(bounds)[-1])
    counts = [count for count in COUNTS if count <= longest and count >= SHORT]
    return {
        count: Point(view=View.ENCODER, rows=1, source=count, enters=True, samples=False)
        for count in counts or [longest]
    }


def increment_points(bounds: PointBounds) -> dict[int, dict[int, Point]]:
    """Return rows of one token that read a context: by rows, then by context."""
    source = 0 if bounds.source_positions is None else 1
    contexts = [context for context in _CONTEXTS if context < bounds.positions] or [bounds.positions - 1]
    found = {
        rows: {context: Point(view=View.LAYERS, rows=rows, start=context - 1, source=source) for context in contexts}
        for rows in _BATCHES
    }
    return _fitting(found, bounds)


def cross_points(bounds: PointBounds) -> dict[int, dict[int, Point]]:
    """Return rows of one token that read a source: by rows, then by source tokens."""
    assert bounds.source_positions is not None
    found = {
        rows: {
            source: Point(view=View.LAYERS, rows=rows, source=source)
            for source in _SOURCES
            if source <= bounds.source_positions
        }
        for rows in _BATCHES[::2]
    }
    return _fitting(found, bounds)


def memory_points(bounds: PointBounds) -> dict[int, Point]:
    """Return the first decoder steps of new sources, by the tokens of all sources."""
    assert bounds.source_positions is not None
    found = {}
    for tokens in source_rows(bounds):
        if tokens >= SHORT or tokens == source_rows(bounds)[-1]:
            source = min(tokens, 128, bounds.source_positions)
            found[tokens // source * source] = Point(
                view=View.LAYERS, rows=tokens // source, source=source, enters=True
            )
    return {tokens: point for tokens, point in found.items() if point.slots <= bounds.slots}


def kept_points(bounds: PointBounds) -> dict[int, Point]:
    """Return prompts that no token is drawn from, on a stage of one layer and the head: by their tokens."""
    source = 0 if bounds.source_positions is None else 1
    prompts = prompt_points(bounds)
    return {
        count: Point(view=View.KEPT, rows=1, count=count, source=source, enters=True, samples=False)
        for count in _KEPT_COUNTS
        if count in prompts
    }


def headed_points(bounds: PointBounds) -> dict[int, Point]:
    return {rows: rest_point(rows, bounds, View.HEADED) for rows in _BATCHES}


def fewer_points(bounds: PointBounds) -> dict[int, Point]:
    return {rows: rest_point(rows, bounds, View.FEWER) for rows in _FEWER}


def embedding_points(bounds: PointBounds, view: View) -> dict[int, Point]:
    """Return the same rows with and without an embedding. Args: view: EMBEDDED or BARE."""
    return {rows: rest_point(rows, bounds, view) for rows in _EMBEDDED if rows <= rest_rows(bounds)[-1]}


def link_points(bounds: PointBounds, view: View) -> dict[int, Point]:
    """Return messages by their bytes. Args: view: ALL_REDUCE or SEND."""
    is_measured = bounds.ranks > 1 if view is View.ALL_REDUCE else bounds.sends
    sizes = [rows * bounds.row_bytes for rows in _MESSAGE_ROWS] if is_measured else []
    return {size: Point(view=view, size=size) for size in sizes}


def all_points(bounds: PointBounds, *, has_fewer: bool) -> list[Point]:
    """Return every point once, the cheap ones first. Args: has_fewer: there are at least two layers in the decoder."""
    return sorted(dict.fromkeys(_all(bounds, has_fewer=has_fewer)), key=lambda point: point.work)


def _all(bounds: PointBounds, *, has_fewer: bool) -> Iterator[Point]:
    yield from (rest_point(rows, bounds) for rows in rest_rows(bounds))
    for points in (prompt_points(bounds), increment_points(bounds)):
        for each in points.values():
            yield from each.values()
    yield from kept_points(bounds).values()
    yield from headed_points(bounds).values()
    if has_fewer:
        yield from fewer_points(bounds).values()
    for view in (View.EMBEDDED, View.BARE):
        yield from embedding_points(bounds, view).values()
    for view in (View.ALL_REDUCE, View.SEND):
        yield from link_points(bounds, view).values()
    if bounds.source_positions is not None:
        yield from (rest_point(rows, bounds, View.ENCODER) for rows in source_rows(bounds))
        yield from source_points(bounds).values()
        yield from memory_points(bounds).values()
        for each in cross_points(bounds).values():
            yield from each.values()


def _fitting(found: dict[int, dict[int, Point]], bounds: PointBounds) -> dict[int, dict[int, Point]]:
    """Leave out the points that need too many slots."""
    fitting = {
        rows: {length: point for length, point in points.items() if point.slots <= bounds.slots}
        for rows, points in found.items()
    }
    return {rows: points for rows, points in fitting.items() if points}


def slots_of(points: Sequence[Point], view: View) -> int:
    """Return the KV slots that the largest step of a view needs."""
    return max((point.slots for point in points if point.view is view), default=0)
