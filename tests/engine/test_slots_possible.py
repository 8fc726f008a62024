"""worker.rank: how many KV slots a rank offers."""

from types import SimpleNamespace

import torch

from orca.worker.rank import slots_possible
from orca.worker.settings import WorkerSettings

CPU = torch.device("cpu")


def slots(bytes_per_slot: int, **choices: object) -> int:
    model = SimpleNamespace(kv_bytes_per_slot=bytes_per_slot)
    return slots_possible(WorkerSettings(model="/m", **choices), model, CPU)  # type: ignore[arg-type]


def test_slots_stop_at_the_setting() -> None:
    assert slots(1, slots_max=1000) == 1000


def test_a_slot_of_twice_the_bytes_halves_the_slots_within_what_memory_moves_meanwhile() -> None:
    assert 0.8 < 2 * slots(2 << 10) / slots(1 << 10) < 1.25


def test_ranks_of_a_stage_divide_the_memory_of_their_machine() -> None:
    assert 0.8 < 4 * slots(1 << 10, tensor=4) / slots(1 << 10) < 1.25


def test_what_no_memory_could_hold_gives_no_slots() -> None:
    assert slots(1 << 60) == 0
