"""The time of a stage, computed from a profile (step_shape.ShapeCost). Pure.

    stage = step(requests) + [embed(rows)] + layers x (rest(rows) + attention of each row) + [head(sampled)] + [send]

The last stage computes only the sampled rows to the end: for all others its last layer only writes keys and values.
A row of one token counts as an increment, a longer row as a prompt.

If ranks compute on all processors, the rest of Orca takes its time from them (loaded_stages.py).
"""

from collections.abc import Sequence
from itertools import accumulate

from orca.core.domain.errors import SettingError
from orca.core.domain.step import Step
from orca.planner.profile.loaded_stages import loaded_stages
from orca.planner.profile.profile import DegreeTimes, Profile, StackTimes
from orca.planner.profile.real_step import SourceLengths, shape_of
from orca.planner.profile.step_shape import ShapeCost, StepShape
from orca.planner.profile.tables import Grid, Line

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StackCost:
    """The time of layers of one stack. All numbers of rows may be expected values."""

    def __init__(self, times: StackTimes) -> None:
        self.rest = times.rest.line()
        self.prompts = times.prompts.grid()
        self._increments = None if times.increments is None else times.increments.grid()
        self._keep = None if times.keep is None else times.keep.line()
        self._cross = None if times.cross is None else times.cross.grid()
        self._memory = None if times.memory is None else times.memory.line()

    def layer_us(self, rows: float, shape: StepShape) -> float:
        """Return the time of a layer that computes all rows."""
        us = self.rest(rows)
        if shape.increments and self._increments is not None:
            us += _scaled(self._increments, shape.increments, shape.context)
        for each in shape.prompts:
            us += each.requests * self.prompts(each.count, each.start)
        if self._cross is not None:
            if shape.source_context:
                us += _scaled(self._cross, rows, shape.source_context)
            if shape.sources and self._memory is not None:
                us += self._memory(shape.source_tokens)
        return us

    def last_layer_us(self, rows: float, layer_us: float, shape: StepShape) -> float:
        """Return the time of the last layer of the last stage, which computes only sampled rows to the end.

        Args: layer_us: the time of a layer that computes all rows.
        """
        sampled = shape.sampled
        if sampled >= rows or self._keep is None:
            return layer_us
        us = self._keep(rows)
        if self._cross is not None and shape.sources and self._memory is not None:
            us += self._memory(shape.source_tokens)
        if sampled > 0.0:
            us += max(0.0, self.rest(sampled) - self._keep(sampled))
            assert self._increments is not None
            us += _scaled(self._increments, sampled, _sampled_context(shape))
            if self._cross is not None and shape.source_context:
                us += _scaled(self._cross, sampled, shape.source_context)
        return min(us, layer_us)


class StageCost:
    """The cost of one stage (step_shape.ShapeCost).

    It keeps the lengths of the sources of running requests. So one object serves one run at a time.

    Args:
        encoder: layers of the encoder that the stage holds.
        layers: layers of the decoder, or of a model's only stack.
        begins: the stage holds the first layer of each stack with layers here: encoder, decoder.
        row_bytes: of a row of activations.
        send: over bytes, to the next stage; None: the last stage.
    """

    def __init__(
        self,
        times: DegreeTimes,
        *,
        encoder: int,
        layers: int,
        begins: tuple[bool, bool],
        row_bytes: int,
        send: Line | None,
    ) -> None:
        self._step, self._embed, self._head = times.step.line(), times.embed.line(), times.head.line()
        self._encoder = StackCost(times.stacks[0])
        self._decoder = StackCost(times.stacks[-1])
        self._has_encoder = len(times.stacks) > 1
        self._encoder_layers, self._layers = encoder, layers
        self._begins_encoder, self._begins_decoder = begins
        self._row_bytes = row_bytes
        self._send = send
        self._sources = SourceLengths()

    def shape_us(self, shape: StepShape) -> float:
        """See step_shape.ShapeCost."""
        rows, source_rows = shape.increments, 0.0
        requests = rows
        for each in shape.prompts:
            rows += each.requests * each.count
            requests += each.requests
        for each in shape.sources:
            source_rows += each.requests * each.count
        if not rows and not source_rows:
            return 0.0
        us = self._step(requests)
        if source_rows and self._encoder_layers:
            us += self._encode_us(shape, source_rows)
        if rows and self._layers:
            us += self._decode_us(rows, shape)
        if self._send is not None:
            # Sources go on to every stage, and targets from the first one with decoder layers.
            sent = source_rows + (rows if self._layers else 0.0)
            if sent:
                us += self._send(sent * self._row_bytes)
        return us

    def stage_us(self, step: Step) -> int:
        """See step_cost.StepCost."""
        if self._has_encoder:
            self._sources.note(step)
        if not step.rows:
            return 0
        return round(self.shape_us(shape_of(step, self._sources.by_handle)))

    def _encode_us(self, shape: StepShape, rows: float) -> float:
        encoder = self._encoder
        layer_us = encoder.rest(rows)
        for each in shape.sources:
            layer_us += each.requests * encoder.prompts(each.count, each.start)
        us = self._encoder_layers * layer_us
        return us + self._embed(rows) if self._begins_encoder else us

    def _decode_us(self, rows: float, shape: StepShape) -> float:
        decoder = self._decoder
        layer_us = decoder.layer_us(rows, shape)
        us = self._layers * layer_us
        if self._send is None:
            us += decoder.last_layer_us(rows, layer_us, shape) - layer_us
            if shape.sampled:
                us += self._head(shape.sampled)
        return us + self._embed(rows) if self._begins_decoder else us


def stage_costs(profile: Profile, layers: Sequence[int], ranks: int, *, groups: int = 1) -> tuple[ShapeCost, ...]:
    """Return the cost of each stage of a layout.

    Args:
        layers: of each stage, stage 0 first; an encoder's layers come before its decoder's.
        ranks: of each stage.
        groups: number of groups with this layout on the machine.
    Raises: SettingError for a layout that the model cannot have, or that the profile has no times for.
    """
    times, stacks = profile.degree(ranks), profile.key.stacks
    total = profile.key.num_layers
    if not layers or min(layers) < 1 or sum(layers) != total:
        shown = ",".join(map(str, layers))
        raise SettingError(f"layers {shown!r} do not divide the profile's {total} layers, at least one for each stage")
    send = None if profile.send is None else profile.send.line()
    if len(layers) > 1 and send is None:
        raise SettingError(
            "the profile has no times of sending, so it knows layouts of one stage only: measure it with --devices 2"
        )
    encoder = stacks[0].layers if len(stacks) > 1 else 0
    costs = []
    for last, count in zip(accumulate(layers), layers, strict=True):
        first = last - count
        in_encoder = max(0, min(last, encoder) - first)
        costs.append(
            StageCost(
                times,
                encoder=in_encoder,
                layers=count - in_encoder,
                begins=(bool(encoder) and first == 0, first <= encoder < last),
                row_bytes=profile.key.hidden_size * _BYTES[profile.key.dtype],
                send=None if last == total else send,
            )
        )
    of_stage, processors = ranks * profile.key.threads, profile.key.processors
    if profile.host is not None and groups * len(layers) * of_stage >= processors:
        return loaded_stages(costs, profile.host, processors=processors, of_stage=of_stage, groups=groups)
    return tuple(costs)


def _scaled(grid: Grid, rows: float, length: float) -> float:
    """Return a time over rows. Less than one row on average takes that share of the time of one."""
    return grid(rows, length) if rows >= 1.0 else rows * grid(1.0, length)


def _sampled_context(shape: StepShape) -> float:
    """Return the average context of sampled rows: increments, and after them the ends of prompts."""
    ends = shape.sampled - shape.increments
    if ends <= 0.0 or not shape.prompts:
        return shape.context
    # The step does not say which of its prompts end here, so each may.
    requests = sum(each.requests for each in shape.prompts)
    end = sum(each.requests * (each.start + each.count) for each in shape.prompts) / requests
    return (shape.increments * shape.context + ends * end) / shape.sampled
