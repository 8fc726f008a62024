"""The paper's settings: which model runs on which devices (Table 2), with which tasks and layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

import orjson

from orca.bench.exegpt.roofline import (
    Efficiencies,
    GpuData,
    PaperModel,
    gpu_data,
    kv_slots,
    paper_models,
    roofline_costs,
)
from orca.bench.exegpt.stage_cost import stage_costs
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.even_parts import even_parts
from orca.planner.search.planner import PlacedLayout
from orca.planner.simulate.estimate import Scenario
from orca.planner.simulate.layout import GroupCapacity, Layout
from orca.planner.workload.tasks import task_workload
from orca.planner.workload.workload import Workload

DEGREES = (1, 2, 4, 8)
"""Degrees of tensor parallelism inside a node."""

PERCENT = 99
"""The percentile of the output length that a latency bound holds for (section 7.1)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on so many devices of one kind."""

    model_name: str
    device: str
    devices: int

    def __str__(self) -> str:
        return f"{self.model_name}, {self.devices} {self.device}"

    @property
    def model(self) -> PaperModel:
        return paper_models()[self.model_name]

    @property
    def gpu(self) -> GpuData:
        return gpu_data()[self.device]

    @property
    def is_encoder_decoder(self) -> bool:
        return self.model.encoder_layers > 0

    @property
    def largest_degree(self) -> int:
        """Return the ranks of a stage with as much tensor parallelism as a node allows: the layout of the baseline."""
        return min(self.devices, self.gpu.devices_per_node)

    def degrees(self) -> list[int]:
        """Return the degrees of tensor parallelism that use all devices, with as many layers on each stage."""
        found = []
        for ranks in DEGREES:
            stages = self.devices // ranks
            layers = (self.model.layers, self.model.encoder_layers)
            fits = kv_slots(self.model, self.gpu, stages=stages, ranks=ranks) > 0
            if ranks <= self.largest_degree and not any(count % stages for count in layers) and fits:
                found.append(ranks)
        return found

    def placed(self, ranks: int, workload: Workload, efficiencies: Efficiencies | None = None) -> PlacedLayout:
        """Return the layout with so many ranks on each stage.

        Args: efficiencies: None: the calibrated ones. Raises: ValueError if the layers cannot be divided equally.
        """
        stages, model = self.devices // ranks, self.model
        chosen = efficiencies or calibrated()
        slots = kv_slots(model, self.gpu, stages=stages, ranks=ranks)
        return PlacedLayout(
            layout=Layout(even_parts(model.encoder_layers + model.layers, stages), ranks),
            costs=stage_costs(roofline_costs(model, self.gpu, chosen, stages=stages, ranks=ranks)),
            capacity=GroupCapacity(
                slots=slots // DEFAULT_BLOCK_TOKENS * DEFAULT_BLOCK_TOKENS,
                max_model_len=workload.longest + self.is_encoder_decoder,
            ),
        )

    def scenario(self, ranks: int, workload: Workload, efficiencies: Efficiencies | None = None) -> Scenario:
        """Return what formulas and simulations of a layout need. Raises: ValueError as `placed` does."""
        placed = self.placed(ranks, workload, efficiencies)
        return Scenario(
            workload=workload,
            costs=placed.costs,
            capacity=placed.capacity,
            is_encoder_decoder=self.is_encoder_decoder,
            percent=PERCENT,
        )


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure of the paper: its settings, and the tasks that each of them runs."""

    name: str
    setups: Sequence[Setup]
    tasks: Sequence[str]


OPT_13B = Setup("OPT 13B", "A40", 4)
GPT_39B = Setup("GPT-3 39B", "A40", 16)
GPT_101B = Setup("GPT-3 101B", "A100", 16)
T5_11B = Setup("T5 11B", "A40", 8)

FIGURES: Mapping[str, PaperFigure] = MappingProxyType(
    {
        "6": PaperFigure("Figure 6", (T5_11B, OPT_13B, GPT_39B, GPT_101B), ("S", "T", "C1")),
        "8": PaperFigure(
            "Figure 8",
            (
                GPT_101B,
                Setup("GPT-3 175B", "A100", 16),
                Setup("GPT-3 175B", "A40", 32),
                Setup("GPT-3 341B", "A40", 48),
            ),
            ("G", "C1", "C2"),
        ),
    }
)


@cache
def workload_of(task: str) -> Workload:
    """Return the workload of a task of Table 3; the same object every time, so that formulas keep what they know."""
    return task_workload(task)


@cache
def calibrated() -> Efficiencies:
    """Return the efficiencies that `orca bench exegpt table6` finds, as the package stores them."""
    found = orjson.loads(resources.files("orca.bench.exegpt").joinpath("efficiencies.json").read_bytes())
    return Efficiencies(**{name: found[name] for name in ("arithmetic", "memory", "links")})
