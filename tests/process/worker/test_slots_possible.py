"""worker.rank.kv_slots: how many KV slots a rank offers."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.encoder_decoder import SOURCE_SLOTS_MAX
from orca.core.domain.errors import EngineError
from orca.worker.models.build import load_stage
from orca.worker.models.model_shape import EncoderDecoderShape, Stack
from orca.worker.parallel.shard import Shard
from orca.worker.rank.kv_slots import memory_available_bytes, slots_possible, source_bytes
from orca.worker.settings import WorkerSettings
from orca.worker.stage.encoder_steps import EncoderSteps

CPU = torch.device("cpu")


STACK = Stack(layers=4, heads=2, head_dim=8, intermediate_size=40)
SEQ2SEQ = EncoderDecoderShape(
    vocab_size=100,
    hidden_size=16,
    num_layers=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    is_tied=False,
    windows=(None,) * 8,
    encoder=STACK,
    decoder=STACK,
)


def slots(bytes_per_slot: int, config: object = None, stage: int = 0, hidden: int = 16, **choices: object) -> int:
    """The slots of a rank. Args: config: None for a decoder-only model; hidden: hidden size of another one."""
    settings = WorkerSettings(model="/m", stage=stage, **choices)  # type: ignore[arg-type]
    model = SimpleNamespace(
        kv_bytes_per_slot=bytes_per_slot,
        weight_bytes=0,
        encoder_layers=4 if config is not None else 0,
        config=SimpleNamespace(num_layers=8) if config is None else replace(SEQ2SEQ, hidden_size=hidden),
        shard=Shard(stage=stage, stages=settings.stages, tensor=settings.tensor),
        info=SimpleNamespace(max_model_len=100),
        dtype=torch.float32,
    )
    return slots_possible(settings, model, CPU)  # type: ignore[arg-type]


def test_slots_are_limited_by_the_setting() -> None:
    assert slots(1, slots_max=1000) == 1000


def test_a_slot_of_twice_the_bytes_halves_the_slots() -> None:
    assert 0.8 < 2 * slots(2 << 10) / slots(1 << 10) < 1.25


def test_ranks_of_a_stage_divide_the_memory_of_their_machine() -> None:
    assert 0.8 < 4 * slots(1 << 10, tensor=4) / slots(1 << 10) < 1.25


@pytest.mark.parametrize(
    ("data_host", "share"), [("127.0.0.1", 6), ("::1", 6), ("localhost", 6), ("10.0.0.7", 2), ("stage-1.orca", 2)]
)
def test_stages_that_nothing_can_reach_from_outside_divide_the_memory_too(data_host: str, share: int) -> None:
    alone = slots(1 << 10)
    assert 0.8 < share * slots(1 << 10, tensor=2, stages=3, data_host=data_host) / alone < 1.25


def test_the_bytes_that_the_slots_take_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "orca.worker.rank.kv_slots")
    slots(1 << 10, slots_max=100, tensor=2)
    [record] = caplog.records
    told = vars(record)
    assert (told["slots"], told["kv_bytes"], told["ranks_sharing"]) == (100, 100 << 10, 2)
    assert told["free_bytes"] > told["kv_bytes"]


def test_a_model_that_does_not_fit_into_memory_gives_no_slots() -> None:
    assert slots(1 << 60) == 0


def test_a_stage_with_only_encoder_layers_offers_as_many_slots_as_it_is_asked_for() -> None:
    assert slots(0, SEQ2SEQ, stages=2, slots_max=1 << 30) == 1 << 30
    assert slots(0, SEQ2SEQ, stages=2) > 1 << 30


def too_wide() -> int:
    """A hidden size with which the sources of a step do not fit into this machine."""
    return memory_available_bytes() // SOURCE_SLOTS_MAX


def test_a_stage_without_memory_for_the_sources_of_a_step_offers_no_slots() -> None:
    for stage in (0, 1):
        assert slots(1 << 10 if stage else 0, SEQ2SEQ, stages=2, stage=stage, hidden=too_wide()) == 0


def test_the_memory_for_the_sources_of_a_step_is_left_free() -> None:
    assert slots(1 << 10, SEQ2SEQ, hidden=too_wide() // 40) < 0.95 * slots(1 << 10, SEQ2SEQ)


def test_only_ranks_that_keep_something_of_a_token_divide_the_memory_of_slots() -> None:
    whole = slots(1 << 10, SEQ2SEQ)
    assert 0.8 < slots(1 << 10, SEQ2SEQ, stages=2, stage=1) / whole < 1.25
    assert 0.8 < 2 * slots(1 << 10, SEQ2SEQ, stages=4, stage=2) / whole < 1.25
    assert 0.8 < 4 * slots(1 << 10, SEQ2SEQ, stages=4, stage=2, tensor=2) / whole < 1.25


def test_the_workspace_of_an_encoder_has_room_for_any_step_and_is_left_free(tmp_path: Path) -> None:
    model = load_stage(tiny_checkpoint("bart", tmp_path))
    assert model.encoder is not None
    steps = EncoderSteps(model, model.encoder, 16)
    assert steps.workspace_bytes <= source_bytes(model, 0)
    steps.prepare([[3] * 16] * (SOURCE_SLOTS_MAX // 16))
    steps.prepare([[3]] * (SOURCE_SLOTS_MAX // 16))
    with pytest.raises(EngineError, match="sources of 513 blocks in one step: a stage has room for 512"):
        steps.prepare([[3]] * (SOURCE_SLOTS_MAX // 16 + 1))


V2 = "0::/system.slice/orca.service"
V1 = "7:cpu,cpuacct:/elsewhere\n4:memory:/docker/d1"


@pytest.mark.parametrize(
    ("own", "files", "available"),  # in KiB
    [
        (V2, {}, 9000),
        (V2, {"system.slice/orca.service/memory.max": 5000, "system.slice/orca.service/memory.current": 1000}, 4000),
        (V2, {"system.slice/memory.max": 3000, "system.slice/memory.current": 1000}, 2000),
        (V2, {"system.slice/orca.service/memory.max": "max", "system.slice/orca.service/memory.current": 1000}, 9000),
        (V2, {"memory.max": 2000, "memory.current": 5000}, 0),
        (V2, {"memory.max": 5000, "memory.current": 3000, "memory.stat": "anon 7\ninactive_file 1024000"}, 3000),
        (
            V1,
            {
                "memory/memory.limit_in_bytes": 5000,
                "memory/memory.usage_in_bytes": 3000,
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 1024000",
            },
            3000,
        ),
        (V1, {"memory/docker/d1/memory.limit_in_bytes": 5000, "memory/docker/d1/memory.usage_in_bytes": 1500}, 3500),
        (V1, {"memory/memory.limit_in_bytes": 5000, "memory/memory.usage_in_bytes": 1000}, 4000),
        (V1, {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": 1000}, 9000),
    ],
    ids=[
        "no limit told",
        "v2",
        "v2 around the own group",
        "v2 without a limit",
        "v2 in a namespace, overdrawn",
        "v2 with files in the cache",
        "v1 with files in the cache",
        "v1",
        "v1 whose own group is not mounted",
        "v1 without a limit",
    ],
)
def test_memory_is_limited_by_the_machine_and_the_tightest_cgroup(
    tmp_path: Path, own: str, files: dict[str, int | str], available: int
) -> None:
    written = {"proc/meminfo": "MemTotal: 16000 kB\nMemAvailable: 9000 kB\n", "proc/self/cgroup": f"{own}\n"}
    for name, size in files.items():
        written[f"sys/fs/cgroup/{name}"] = f"{size}\n" if isinstance(size, str) else f"{size << 10}\n"
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_available_bytes(tmp_path) == available << 10
