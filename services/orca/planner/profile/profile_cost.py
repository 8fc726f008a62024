"""The time of a stage, computed from a profile (step_shape.ShapeCost). Pure.

    stage = step(requests) + [embed(rows)] + layers x (rest(rows) + attention of each row) + [head(sampled)] + [send]
          + [host(requests) / processors]

The last stage computes only the sampled rows to the end: for all others its last layer only writes keys and values.
A row of one token counts as an increment, a longer row as a prompt.

If ranks compute on all processors, the rest of Orca takes its time from them. Each processor then loses its share of
what a step takes on the host, and each stage is so much longer.
"""

from collections.abc import Sequence
from itertools import accumulate

from orca.core.domain.errors import SettingError
from orca.core.domain.step import Epoch, Part, Step
from orca.planner.profile.profile import DegreeTimes, ProcessorTime, Profile, StackTimes
from orca.planner.profile.step_shape import LikeRows, StepShape
from orca.planner.profile.tables import Grid, Line

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_NO_LOSS = ProcessorTime(step_us=0.0, row_us=0.0, answer_us=0.0)


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


class SourceLengths:
    """The source tokens of running requests. Steps name them once, so one object serves one run at a time."""

    def __init__(self) -> None:
        self._epoch: Epoch | None = None
        self.by_handle: dict[int, int] = {}

    def note(self, step: Step) -> None:
        """Take what a step frees and brings. A step of another epoch begins with nothing."""
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            self.by_handle.clear()
        for handle in step.freed:
            self.by_handle.pop(handle, None)
        for new in step.new:
            self.by_handle[new.handle] = new.source_tokens


class StageCost:
    """The cost of one stage (step_shape.ShapeCost).

    It keeps the lengths of the sources of running requests. So one object serves one run at a time.

    Args:
        encoder: layers of the encoder that the stage holds.
        layers: layers of the decoder, or of a model's only stack.
        begins: the stage holds the first layer of each stack with layers here: encoder, decoder.
        row_bytes: of a row of activations.
        send: over bytes, to the next stage; None: the last stage.
        host: time that the stage loses to the rest of Orca.
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
        host: ProcessorTime = _NO_LOSS,
    ) -> None:
        self._host = host
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
        us = self._step(requests) + self._host.us(requests, shape.entering)
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


def shape_of(step: Step, sources: dict[int, int]) -> StepShape:
    """Return the shape of a real step. Args: sources: source tokens of running requests, by handle."""
    increments = context = sampled = entering = tokens = source_sum = 0
    prompts: list[LikeRows] = []
    source_rows: list[LikeRows] = []
    for row in step.rows:
        count = row.count
        if row.part is Part.SOURCE:
            source_rows.append(LikeRows(1, count))
            entering += 1
            continue
        if row.part is Part.UNSPECIFIED and not row.start:
            entering += 1
        if row.sample:
            sampled += 1
        tokens += count
        if sources:
            source_sum += count * sources.get(row.handle, 0)
        if count == 1:
            increments += 1
            context += row.start + 1
        else:
            prompts.append(LikeRows(1, count, row.start))
    return StepShape(
        increments=increments,
        context=context / increments if increments else 0.0,
        prompts=tuple(prompts),
        sampled=sampled,
        entering=entering,
        sources=tuple(source_rows),
        source_context=source_sum / tokens if tokens else 0.0,
    )


def stage_costs(profile: Profile, layers: Sequence[int], ranks: int) -> tuple[StageCost, ...]:
    """Return the cost of each stage of a layout.

    Args:
        layers: of each stage, stage 0 first; an encoder's layers come before its decoder's.
        ranks: of each stage.
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
    host = _host_loss(profile, stages=len(layers), ranks=ranks)
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
                host=host,
            )
        )
    return tuple(costs)


def _host_loss(profile: Profile, *, stages: int, ranks: int) -> ProcessorTime:
    """Return the time that each stage of a layout loses to the rest of Orca in a step.

    The rest runs beside the ranks as long as there is a processor on which none of them computes.
    """
    key, load = profile.key, profile.host
    if load is None or stages * ranks * key.threads < key.processors:
        return _NO_LOSS
    service, controller, processors = load.service, load.controller, key.processors
    return ProcessorTime(
        step_us=(service.step_us + stages * controller.step_us) / processors,
        row_us=(service.row_us + stages * controller.row_us) / processors,
        answer_us=(service.answer_us + stages * controller.answer_us) / processors,
    )


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
