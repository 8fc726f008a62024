"""The scheduler of a folder with an encoder-decoder model, on a real Redis and simulated stages."""

import asyncio
import contextlib
import gc
import json
import shutil
from pathlib import Path

import pytest

from orca.core.domain.engine import EngineShape
from orca.core.domain.request import End, FinishReason, Request, SamplingParams
from orca.pool.records import LogSlice, OnDisconnect, Submission
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool
from orca.scheduler.engines.simulated_engine import SimulatedEngine
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.service import _serve
from orca.scheduler.settings import SchedulerSettings
from support.scheduler.scheduler_simulation import by_index
from support.waiting import PATIENT_POOL, until

SMALL_MODEL = Path(__file__).parents[3] / "services" / "orca" / "cli" / "small_model" / "orca-austen"
T5 = {"model_type": "t5", "vocab_size": 4096, "n_positions": 16, "eos_token_id": 1, "decoder_start_token_id": 0}


def t5_folder(folder: Path) -> Path:
    """Write a folder with a T5 of 16 positions, as far as a scheduler reads it."""
    folder.mkdir()
    shutil.copy(SMALL_MODEL / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text(json.dumps(T5))
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folder


def a_request(revision: str, name: str, prefix: tuple[int, ...]) -> Request:
    return Request(
        parent=name,
        choice=0,
        revision=revision,
        prompt=(5, 6, 7),
        decoder_prefix=prefix,
        max_new_tokens=4,
        sampling=SamplingParams(),
    )


async def log_after_its_end(pool: RedisPool, request: Request) -> LogSlice:
    await pool.submit(
        Submission(parent=request.parent, requests=(request,), reader="r", on_disconnect=OnDisconnect.KEEP)
    )

    async def has_ended() -> bool:
        return (await pool.read(request.id, 0)).end is not None

    await until(has_ended, limit_s=60)
    return await pool.read(request.id, 0)


@pytest.mark.parametrize("stages", [1, 2])
async def test_it_promises_both_tables_runs_a_target_and_refuses_a_request_without_one(
    tmp_path: Path, stages: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "orca.scheduler")
    shape = EngineShape(stages=stages, slots=256, block_tokens=16, max_model_len=32)
    engine = SimulatedEngine(shape, tokens=by_index(lambda index: 9 - index), cost=LinearCost(step_us=500))
    with EmbeddedRedis(tmp_path / "redis") as redis:
        settings = SchedulerSettings(model=str(t5_folder(tmp_path / "t5")), stages=("h:1",), pool=redis.url)
        pool = RedisPool(redis.url, settings.deployment, PATIENT_POOL)
        service = asyncio.create_task(_serve(settings, PATIENT_POOL, lambda *_: engine))
        try:

            async def has_promised() -> bool:
                return (await pool.stats()).promised_slots is not None

            await until(has_promised, limit_s=60)
            stats = await pool.stats()
            assert stats.promised_slots == 48, "32 tokens in the split that needs most have three blocks"
            assert stats.revision is not None
            log = await log_after_its_end(pool, a_request(stats.revision, "A", (0,)))
            assert ([token.id for token in log.tokens], log.end) == ([9, 8, 7, 6], End(FinishReason.LENGTH, 4))
            refused = (await log_after_its_end(pool, a_request(stats.revision, "B", ()))).end
            assert refused is not None
            assert refused.reason is FinishReason.REFUSED
            assert "no decoder_prefix" in (refused.detail or "")
            [line] = [record for record in caplog.records if record.message == "the prefix cache is off"]
            assert "depend on its source" in vars(line)["reason"]
            assert not gc.isenabled(), "garbage is collected at a pace"
        finally:
            service.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await service
            await pool.close()
