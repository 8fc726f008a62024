"""The options that `orca plan` and `orca follow` share: the profile, the goal, and the room for a schedule."""

import dataclasses
from math import inf
from typing import Any

from orca.cli.job_result import ResultSettings
from orca.core.domain.errors import SettingError
from orca.core.process.settings import check_bounds, require, required, setting
from orca.planner.follow.check import PlanLimits
from orca.planner.profile.profile import Profile
from orca.planner.search.device_layouts import MEMORY_SHARE, DeviceMemory, Shape
from orca.planner.search.goal import KINDS, PlanGoal
from orca.planner.search.profiled_problem import HOST_US
from orca.planner.search.strategies import STRATEGIES
from orca.planner.workload.workload import Workload, parse_workload
from orca.worker.parallel.stage_layers import read_layers

NUMBER_MAX = 1e9
"""Largest value of options that are plain numbers: far above any that makes sense."""

STATED_FORM = "PROMPT/OUTPUT, such as 32:512/1:128: one length N, uniform as N:M, or normal as N:M:MEAN:SD"
"""The form of stated lengths, for help texts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings(ResultSettings):
    """The options of a search for a schedule."""

    profile: str = required("file of a profile, as `orca profile` writes it")
    devices: int = setting(
        0, "devices of a group: GPUs, or rank processes on CPUs; 0 means as many as were measured together", least=0
    )
    latency_ms: float | None = setting(
        None, "bound on the latency, in milliseconds; unset: the most throughput is wanted, whatever the latency"
    )
    percentile: int = setting(99, "share of the answers that the bounds hold for, in percent, from 50 to 99")
    kind: str = setting(
        "sequence",
        "sequence: from the first step to the last token, without the time in the queue; requests: from submission to"
        " the last token, at the arrival rate",
        choices=KINDS,
    )
    rate: float | None = setting(None, "arrival rate in requests per second, for the kind requests")
    ttft_ms: float | None = setting(None, "further bound on the time to the first token, in milliseconds")
    tpot_ms: float | None = setting(None, "further bound on the mean time between tokens, in milliseconds")
    margin_percent: float = setting(0.0, "tightens every bound by so much", least=0)
    strategies: tuple[str, ...] = setting(
        tuple(STRATEGIES), "comma-separated strategies to search", choices=tuple(STRATEGIES)
    )
    stages: int | None = setting(None, "only layouts with so many stages", least=1)
    tensor: int | None = setting(None, "only layouts with so many ranks in a stage", least=1)
    layers: str | None = setting(None, "only this division of the layers, such as 10,6; stages must be unset or equal")
    max_batch_size: int | None = setting(
        None, "most requests in a batch, under rra in a micro-batch; unset: as many as the slots hold", least=1
    )
    slots: int | None = setting(
        None, "KV slots of a group in tokens; unset: as many as the memory has room for", least=1
    )
    least_slots: int | None = setting(
        None,
        "only layouts whose memory has room for so many KV slots, such as a pool has promised to a request; unset: all",
        least=1,
    )
    memory_gib: float | None = setting(
        None, "memory of a device for weights and KV cache in GiB; unset: as when the profile was measured"
    )
    memory_share: float = setting(
        MEMORY_SHARE, "share of the memory left by the weights that KV slots get, as for the worker"
    )
    max_model_len: int | None = setting(
        None, "longest prompt and output together in tokens; unset means the model's own", least=1
    )
    prefetch: int = setting(1, "as for the scheduler: 1 submits one more batch before the oldest was read", least=0)
    host_us: float = setting(
        HOST_US, "microseconds from a result to the next step at stage 0; prefetch hides them", least=0
    )
    seed: int = setting(0, "seed of the simulated requests")

    def __post_init__(self) -> None:
        # super() does not find the class of a dataclass with slots.
        ResultSettings.__post_init__(self)
        check_bounds(self)
        require(self.prefetch <= 1, self, "prefetch", "0 or 1")
        require(0 < self.memory_share <= 1, self, "memory_share", "above 0, at most 1")
        for name in ("memory_gib", "rate", "host_us"):
            require_number(self, name, is_zero_good=name == "host_us")
        require(bool(self.strategies), self, "strategies", f"any of {', '.join(STRATEGIES)}")
        self.goal()

    def goal(self) -> PlanGoal:
        """Return the bounds. Raises: BadValue that names the setting."""
        return PlanGoal(
            latency_ms=inf if self.latency_ms is None else self.latency_ms,
            percentile=self.percentile,
            kind=self.kind,
            rate=self.rate,
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            margin_percent=self.margin_percent,
        )

    def limits(self, profile: Profile) -> PlanLimits:
        """Return the resources and choices that a plan may use.

        Args: profile: has defaults.
        Raises: BadValue if the layers do not fit its model.
        """
        layers, given = None, self.memory_gib
        if self.layers is not None:
            stages = self.stages or self.layers.count(",") + 1
            layers = read_layers(self.layers, stages=stages, num_layers=profile.key.num_layers)
        return PlanLimits(
            devices=self.devices or profile.key.devices,
            shape=Shape(stages=self.stages, ranks=self.tensor, layers=layers),
            memory=DeviceMemory(
                slots=self.slots,
                device_bytes=profile.device_bytes if given is None else int(given * (1 << 30)),
                share=self.memory_share,
                least_slots=self.least_slots,
            ),
            max_model_len=self.max_model_len,
            strategies=self.strategies,
            max_batch_size=self.max_batch_size,
            host_us=self.host_us,
            prefetch=self.prefetch,
        )


def require_number(settings: Any, name: str, *, is_zero_good: bool = False) -> None:
    """Check a plain number; None is good, too. Raises: BadValue that names the setting."""
    value = getattr(settings, name)
    is_good = value is None or (value <= NUMBER_MAX and (value > 0 or is_zero_good))
    require(is_good, settings, name, f"a number above 0 and at most {NUMBER_MAX:,.0f}")


def read_stated(text: str) -> Workload:
    """Read lengths in STATED_FORM. Raises: SettingError that names the setting `workload`."""
    try:
        return parse_workload(text)
    except ValueError as error:
        raise SettingError(f"setting workload: {error}") from error
