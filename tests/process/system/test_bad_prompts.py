"""Fifteen bad prompts beside eight clients, from HTTP to the model's numbers: each is a 400, and nobody else notices.

Some are bad to the gateway. The others are as an older gateway may have stored them: only the ranks refuse these. The
group runs as many steps after each bad prompt as the test allows, so nothing here depends on time. The neighbours are
compared with a run without bad prompts.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import httpx
import orjson
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from orca.bench.parts.tiny_model import VOCAB, write_tiny_model
from orca.core.domain.model import ModelInfo, load_model_info
from orca.core.domain.request import FinishReason
from orca.core.domain.text import Tokenizer
from orca.gateway.models.models import ServedModel
from orca.gateway.settings import GatewaySettings
from orca.pool.memory.pool import MemoryPool
from orca.worker.models.build import load_stage
from orca.worker.rank.local_engine import LocalEngine
from support.gateway.gateway_rig import Rig, WallClock, error_of, rig, until
from support.worker.paced_engine import PacedEngine
from support.worker.scheduled import REVISION, Scheduled, a_request

CLIENTS, BAD_PROMPTS, STEPS_BETWEEN = 8, 15, 2
NEW_TOKENS = 40
assert NEW_TOKENS > BAD_PROMPTS * STEPS_BETWEEN, "no neighbour ends before the last bad prompt"
BAD_TEXT = "hello <pad> world"


def tokenizer() -> Tokenizer:
    """A token for each printable character, as many as the model has rows, and one more."""
    letters = ["<|end|>", *map(chr, range(33, 127)), "Ġ", "Ċ"]
    inner = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<pad>", special=True)])
    assert inner.token_to_id("<pad>") == VOCAB
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    decoder = orjson.loads(inner.to_str())["decoder"]
    return Tokenizer(inner, decoder=decoder, named_special_tokens={"eos_token": "<|end|>"}, chat_template=template)


@dataclass
class Outcome:
    """The results of a run."""

    texts: list[str]
    steps: list[list[int]]  # of each neighbour
    answers: list[httpx.Response]  # to the bad prompts
    ends: list[tuple[FinishReason, str | None]]  # of the bad requests that were in the pool already
    epochs: int


async def stream_text(one: Rig, prompt: str) -> tuple[str, str]:
    """Returns: the call's id, and the text of its stream."""
    body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    response = await one.post("/v1/completions", **body)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    chunks = [orjson.loads(line) for line in lines]
    assert all("error" not in chunk for chunk in chunks), chunks[-1]
    return chunks[0]["id"], "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def bad_call(one: Rig, number: int) -> httpx.Response:
    if number % 3 == 0:
        return await one.post("/v1/chat/completions", messages=[{"role": "user", "content": BAD_TEXT}])
    return await one.post("/v1/completions", prompt=BAD_TEXT, stream=number % 3 == 1)


async def run(info: ModelInfo, folder: Path, bad_prompts: int) -> Outcome:
    engine = PacedEngine(LocalEngine([load_stage(folder, packs=False)], slots=4096, block_tokens=16, prefetch=1))
    pool, served = MemoryPool(WallClock()), ServedModel.of(info, tokenizer(), GatewaySettings(model="tiny"))
    async with (
        Scheduled(engine, max_batch_size=CLIENTS + 2, prefetch=1, pool=pool) as group,
        rig(pool=pool, schedules=False, model=info, newest=served) as one,
    ):
        streams = [asyncio.create_task(stream_text(one, f"neighbour {number}")) for number in range(CLIENTS)]
        answers, stored = [], [a_request(f"bad{number}", (5, VOCAB, 6), 10) for number in range(bad_prompts)]
        try:
            for number, request in enumerate(stored):
                answers.append(await bad_call(one, number))
                await group.submit(request)
                engine.allow(STEPS_BETWEEN)
                steps = STEPS_BETWEEN * (number + 1)
                await until(lambda steps=steps: len(group.log.records) >= steps)  # type: ignore[misc]
            assert not any(stream.done() for stream in streams), "all of them ran all the time"
        finally:
            engine.set_free()
        logs = [await group.outcome_of(request) for request in stored]
        texts = [await stream for stream in streams]
        await until(lambda: not engine.slots_in_use)
        return Outcome(
            texts=[text for _, text in texts],
            steps=[group.steps_of(a_request(name, (1,), 1)) for name, _ in texts],
            answers=answers,
            ends=[(end.reason, end.detail) for _, end in logs],
            epochs=len({record.epoch for record in group.log.records}),
        )


def gaps(steps: Sequence[int]) -> set[int]:
    return {after - before for before, after in pairwise(steps)}


async def test_fifteen_bad_prompts_beside_eight_clients_are_400_and_cost_nobody_a_token_or_a_step(
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text("{}")
    info = replace(load_model_info(folder), revision=REVISION, max_model_len=200)
    undisturbed, disturbed = await run(info, folder, 0), await run(info, folder, BAD_PROMPTS)
    assert disturbed.texts == undisturbed.texts
    assert disturbed.epochs == undisturbed.epochs == 1
    for steps in (*undisturbed.steps, *disturbed.steps):
        assert (len(steps), gaps(steps)) == (NEW_TOKENS, {1}), "a token in every step"
    for number, answer in enumerate(disturbed.answers):
        status, error = error_of(answer)
        assert (status, error["param"]) == (400, "messages" if number % 3 == 0 else "prompt")
        assert f"'<pad>' with id {VOCAB}" in error["message"]
    reason = f"the prompt has the token id {VOCAB}, and the model knows only ids from 0 to {VOCAB - 1}"
    assert disturbed.ends == [(FinishReason.REFUSED, reason)] * BAD_PROMPTS
