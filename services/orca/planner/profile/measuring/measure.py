"""Measures a profile: for each tensor degree, rounds over all points until the time is over, or there are enough.

A first pass finds out how long each point takes, and leaves out the slow ones that would not fit. Then each round times
every point once, in another order. So a machine that is slower for a while changes all points, and the medians none.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from orca.core.domain.errors import ModelError, SettingError
from orca.core.domain.model import ModelInfo, load_model_info
from orca.planner.profile.measuring.model_key import profile_key
from orca.planner.profile.measuring.points import POSITIONS_MIN, Point, PointBounds, all_points
from orca.planner.profile.measuring.process_order import ProcessOrder, StepTime
from orca.planner.profile.measuring.processes import Processes, running
from orca.planner.profile.measuring.summary import Rounds, degree_times, send_times
from orca.planner.profile.profile import Curve, DegreeTimes, Profile, ProfileKey
from orca.worker.rank.kv_slots import memory_available_bytes

_SLOTS_MAX = 16_384
_KV_SHARE = 0.25
"""Share of the free memory that the KV caches of all processes may take."""
_FIRST_PASS_SHARE = 0.15
"""Share of a degree's time after which the first pass leaves out what comes next."""
_REPEATS = ((5_000, 5), (30_000, 3), (150_000, 2))
"""Repeats of a point in a round, by the microseconds that its step may take. A slower step is timed once."""
_LINK_REPEATS = 5
_ROUNDS_MAX = 24
"""Rounds after which the medians of a small model hardly change any more."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurePlan:
    """The order for a measurement."""

    model: Path
    dtype: str
    quantization: str | None
    device: str
    threads: int  # of each rank
    devices: int  # processes that run at the same time
    ranks: tuple[int, ...]  # tensor degrees, rising
    minutes: float  # for all degrees together
    release: str


def measure(plan: MeasurePlan, report: Report) -> Profile:
    """Measure a model.

    Args: report: called with a line about the progress now and then.
    Raises: ModelError for a model that cannot be served; SettingError that names the option that does not fit it;
        EngineError if a measuring process fails.
    """
    begun_s = time.monotonic()
    if plan.device == "cuda" and plan.devices > (count := torch.cuda.device_count()):
        raise SettingError(f"--device cuda: --devices is {plan.devices}, and this machine has {count} GPUs")
    info = load_model_info(plan.model, dtype=plan.dtype, quantization=plan.quantization)
    key = profile_key(
        info,
        device=plan.device,
        threads=plan.threads,
        ranks=plan.ranks,
        devices=plan.devices,
        release=plan.release,
    )
    _check(plan, key)
    device_bytes = _free_bytes(plan)
    degrees: list[DegreeTimes] = []
    send: Curve | None = None
    for number, ranks in enumerate(plan.ranks, start=1):
        ends_s = begun_s + 60 * plan.minutes * number / len(plan.ranks)
        rounds = _measure_degree(plan, info, key, ranks, ends_s, report, sends=number == 1 and plan.devices > 1)
        encoder_layers = 0 if info.encoder_decoder is None else info.encoder_decoder.encoder_layers
        degrees.append(degree_times(rounds, encoder_layers=encoder_layers))
        send = send_times(rounds) or send
    seconds = round(time.monotonic() - begun_s, 1)
    return Profile(
        key=key,
        digest=key.digest,
        seconds=seconds,
        device_bytes=device_bytes,
        send=send,
        host=None,
        degrees=tuple(degrees),
    )


def _free_bytes(plan: MeasurePlan) -> int:
    """Return the free memory of one device."""
    if plan.device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return memory_available_bytes() // plan.devices


def _check(plan: MeasurePlan, key: ProfileKey) -> None:
    """Raises: SettingError, ModelError for what cannot be measured here."""
    heads = min(stack.heads for stack in key.stacks)
    for ranks in plan.ranks:
        if ranks > plan.devices:
            raise SettingError(f"--ranks {ranks} is more than --devices {plan.devices}: each rank needs a device")
        if ranks > heads:
            raise SettingError(f"--ranks {ranks} is more than the {heads} attention heads that ranks divide")
    if key.max_model_len < POSITIONS_MIN:
        raise ModelError(f"{plan.model}: texts of {key.max_model_len} tokens are too short to profile")


def bounds_of(info: ModelInfo, key: ProfileKey, ranks: int, *, kv_bytes: int, sends: bool) -> PointBounds:
    """Return the largest steps to measure. Args: kv_bytes: memory for the KV cache of one process."""
    decoder = key.stacks[-1]
    itemsize = 4 if key.dtype == "float32" else 2
    per_slot = decoder.layers * 2 * -(-decoder.kv_heads // ranks) * decoder.head_dim * itemsize
    positions, source_positions = key.max_model_len, None
    if info.encoder_decoder is not None:
        half = key.max_model_len // 2
        positions = min(half, info.encoder_decoder.target_positions or half)
        source_positions = min(half, info.encoder_decoder.source_positions or half)
    return PointBounds(
        positions=positions,
        source_positions=source_positions,
        slots=max(2048, min(_SLOTS_MAX, kv_bytes // per_slot)),
        row_bytes=key.hidden_size * itemsize,
        ranks=ranks,
        sends=sends,
    )


def _measure_degree(
    plan: MeasurePlan, info: ModelInfo, key: ProfileKey, ranks: int, ends_s: float, report: Report, *, sends: bool
) -> Rounds:
    processes = plan.devices // ranks * ranks
    free_bytes = torch.cuda.mem_get_info(0)[0] * processes if plan.device == "cuda" else memory_available_bytes()
    bounds = bounds_of(info, key, ranks, kv_bytes=int(_KV_SHARE * free_bytes) // processes, sends=sends)
    degree = f"stages of {ranks} rank{'' if ranks == 1 else 's'}"
    report(f"{degree}: {'1 process loads' if processes == 1 else f'{processes} processes load'} the model")
    with TemporaryDirectory(prefix="orca-profile-") as folder:
        orders = [
            ProcessOrder(
                model=str(plan.model),
                dtype=plan.dtype,
                quantization=plan.quantization,
                device=plan.device,
                threads=plan.threads,
                number=number,
                processes=processes,
                folder=folder,
                bounds=asdict(bounds),
            )
            for number in range(processes)
        ]
        with running(orders) as measuring:
            points = all_points(bounds, has_fewer=measuring.facts.fewer_layers > 0)
            times = Visits(measuring, points, degree, report).run(ends_s)
            return Rounds(bounds, measuring.facts, times)


class Visits:
    """The visits to all points of one degree."""

    def __init__(self, processes: Processes, points: Sequence[Point], degree: str, report: Report) -> None:
        self._processes, self._points = processes, points
        self._degree, self._report = degree, report
        self._repeats: dict[int, int] = {}  # by index of the point, in the order of the first pass

    def run(self, ends_s: float) -> dict[Point, list[StepTime]]:
        """Return the times of each round, at least of one."""
        begun_s = time.monotonic()
        self._pass_first(begun_s + _FIRST_PASS_SHARE * (ends_s - begun_s))
        times: dict[int, list[StepTime]] = {index: [] for index in self._repeats}
        random, took_s, rounds = Random(1), 0.0, 0
        while not rounds or (rounds < _ROUNDS_MAX and time.monotonic() + took_s < ends_s):
            round_s = time.monotonic()
            order = list(times)
            random.shuffle(order)
            for index in order:
                times[index].append(self._processes.visit(index, self._points[index], self._repeats[index]))
            rounds += 1
            took_s = time.monotonic() - round_s
            left = max(0, min(int((ends_s - time.monotonic()) / took_s), _ROUNDS_MAX - rounds))
            self._report(f"{self._degree}: round {rounds} took {took_s:.1f} s, about {left} more")
        return {self._points[index]: each for index, each in times.items()}

    def _pass_first(self, ends_s: float) -> None:
        """Visit each point once, the cheap ones first, and choose its repeats."""
        left_out = []
        for index, point in enumerate(self._points):
            if time.monotonic() > ends_s and not (point.is_small or point.is_link):
                left_out.append(point)
                continue
            if point.is_link:
                self._processes.visit(index, point, 1)
                self._repeats[index] = _LINK_REPEATS
                continue
            least = int(point.brings_sources)  # its first step is another one
            us = self._processes.visit(index, point, least).total_us
            self._repeats[index] = next((repeats for most, repeats in _REPEATS if us < most), least)
        line = f"{self._degree}: {len(self._repeats)} kinds of steps"
        if left_out:
            longest = max(point.tokens for point in left_out)
            line += f", {len(left_out)} of up to {longest} rows left out because --minutes is too short"
        self._report(line)
