"""The layouts that a profile allows on some devices, with the times of their stages and their KV slots."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from orca.core.domain.errors import SettingError
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.planner.profile.profile import Profile
from orca.planner.profile.profile_cost import stage_costs
from orca.planner.profile.step_shape import LikeRows, ShapeCost, StepShape
from orca.planner.search.layouts import balanced, layouts
from orca.planner.search.planner import PlacedLayout
from orca.planner.simulate.layout import GroupCapacity, Layout
from orca.planner.workload.workload import Workload

TYPICAL_BATCH = 16
"""Requests of the decode step by which layers are divided over stages."""

MEMORY_SHARE = 0.5
"""Share of the memory left by the weights that KV slots get, as the worker's `memory_share` by default."""


ROOM_SHARE = 0.9
"""Share of `least_slots` from which a layout counts as roomy: the memory may hold a little more than computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The parts of a layout that a user has fixed. None: free."""

    stages: int | None = None
    ranks: int | None = None
    layers: tuple[int, ...] | None = None  # of each stage

    def allows(self, layout: Layout) -> bool:
        stages = len(self.layers) if self.layers is not None else self.stages
        return stages in (None, layout.stages) and self.ranks in (None, layout.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of a group."""

    slots: int | None = None  # KV slots that the group is given; None: as many as there is room for
    device_bytes: int = 0  # of one device
    share: float = MEMORY_SHARE  # of what the weights leave, that KV slots get
    least_slots: int | None = None  # a group without memory for so many would not form; None: any number will do


def profiled_layouts(
    profile: Profile,
    workload: Workload,
    *,
    devices: int,
    shape: Shape,
    memory: DeviceMemory,
    max_model_len: int,
    at_least: int = 1,
    groups: int = 1,
) -> list[PlacedLayout]:
    """Return the layouts on up to `devices` devices, each with even layers, and also balanced if that differs.

    Args:
        at_least: so many devices are used.
        groups: number of groups on the machine of the profile.
    Raises: SettingError if what is fixed, or the memory, allows none.
    """

    @cache
    def costs_of(layout: Layout) -> tuple[ShapeCost, ...]:
        return stage_costs(profile, layout.layers, layout.ranks, groups=groups)

    work = typical_work(workload, is_encoder_decoder=len(profile.key.stacks) > 1)
    found, roomiest = [], 0
    for even in layouts(profile.key.num_layers, devices, profile.key.ranks):
        if even.stages * even.ranks < at_least or not shape.allows(even):
            continue
        for layout in _cuts(even, shape, lambda layout: balanced(layout, costs_of, work)):
            capacity = group_capacity(profile, layout, memory, max_model_len)
            if capacity is None:
                continue
            room = memory_slots(profile, layout, memory)
            roomiest = max(roomiest, room)
            if room >= ROOM_SHARE * (memory.least_slots or 0):
                found.append(PlacedLayout(layout=layout, costs=costs_of(layout), capacity=capacity))
    if not found:
        too_small = f"; a group needs {memory.least_slots} KV slots, and the memory has room for {roomiest}"
        raise SettingError(_complaint(profile, devices, shape) + (too_small if roomiest else ""))
    return found


def group_capacity(profile: Profile, layout: Layout, memory: DeviceMemory, max_model_len: int) -> GroupCapacity | None:
    """Return what a group of this layout can hold; None if there is no room for a block."""
    slots = group_slots(profile, layout, memory)
    if slots < DEFAULT_BLOCK_TOKENS:
        return None
    return GroupCapacity(slots=slots, max_model_len=max_model_len, is_chosen=memory.slots is not None)


def typical_work(workload: Workload, *, is_encoder_decoder: bool) -> list[tuple[float, StepShape]]:
    """Return the steps of a mean request: its prompt, and its share of the decode steps of a typical batch."""
    prompt, output = workload.prompts.mean, workload.outputs.mean
    rows = (LikeRows(1, prompt),)
    if is_encoder_decoder:
        entering = StepShape(increments=1, context=1, sampled=1, entering=1, sources=rows, source_context=prompt)
    else:
        entering = StepShape(prompts=rows, sampled=1, entering=1)
    decoding = StepShape(
        increments=TYPICAL_BATCH,
        context=output / 2 + (0 if is_encoder_decoder else prompt),
        sampled=TYPICAL_BATCH,
        source_context=prompt if is_encoder_decoder else 0.0,
    )
    return [(1.0, entering), (max(output - 1, 0.0) / TYPICAL_BATCH, decoding)]


def group_slots(profile: Profile, layout: Layout, memory: DeviceMemory) -> int:
    """Return the KV slots of a group in whole blocks, those that it is given or that fit; 0 for no room."""
    if memory.slots is not None:
        return memory.slots // DEFAULT_BLOCK_TOKENS * DEFAULT_BLOCK_TOKENS
    return memory_slots(profile, layout, memory)


def memory_slots(profile: Profile, layout: Layout, memory: DeviceMemory) -> int:
    """Return the KV slots in whole blocks that fit into the stage with the least room; 0 for no room."""
    degree = profile.degree(layout.ranks)
    slots: list[int] = []
    for number, stacks in enumerate(stacks_of_stages(profile, layout)):
        per_layer = zip(stacks, degree.weight_bytes_per_layer, strict=True)
        weights = sum(layers * weight for layers, weight in per_layer)
        weights += degree.embed_bytes if number == 0 else 0
        weights += degree.head_bytes if number == layout.stages - 1 else 0
        per_slot = stacks[-1] * degree.kv_bytes_per_slot
        if weights > memory.device_bytes:
            return 0
        if per_slot:
            slots.append(int((memory.device_bytes - weights) * memory.share / per_slot))
    return min(slots, default=0) // DEFAULT_BLOCK_TOKENS * DEFAULT_BLOCK_TOKENS


def stacks_of_stages(profile: Profile, layout: Layout) -> list[tuple[int, ...]]:
    """Return the layers of each stack on each stage; an encoder's layers come before its decoder's."""
    ends, first = [], 0
    for stack in profile.key.stacks:
        ends.append((first, first + stack.layers))
        first += stack.layers
    found, begin = [], 0
    for layers in layout.layers:
        stage = range(begin, begin + layers)
        found.append(tuple(max(0, min(stage.stop, end) - max(stage.start, start)) for start, end in ends))
        begin += layers
    return found


def _cuts(even: Layout, shape: Shape, balance: Callable[[Layout], Layout]) -> Iterator[Layout]:
    if shape.layers is not None:
        yield Layout(shape.layers, even.ranks)
        return
    yield even
    if even.stages > 1 and (better := balance(even)) != even:
        yield better


def _complaint(profile: Profile, devices: int, shape: Shape) -> str:
    ranks: Sequence[int] = profile.key.ranks
    words = [f"{devices} devices", f"profiled ranks {', '.join(map(str, ranks))}", f"{profile.key.num_layers} layers"]
    words += [f"{name} {value}" for name, value in (("stages", shape.stages), ("tensor", shape.ranks)) if value]
    return f"no layout is possible with {', '.join(words)}, and the memory for weights and KV cache"
