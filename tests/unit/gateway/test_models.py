"""A gateway that knows two models while a deployment goes from one to the other: no call fails, no two are mixed."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import orca.cli.small_model as small_model
from orca.core.domain.errors import SettingError
from orca.core.domain.text import Tokenizer
from orca.core.other_model import OtherModel
from orca.gateway.models.models import ServedModel, load_others
from orca.gateway.settings import GatewaySettings, parse_settings
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import (
    MODEL,
    SLOTS,
    FakeScheduler,
    Rig,
    WallClock,
    error_of,
    events,
    rig,
    tokenizer,
    until,
)
from support.gateway.target_rig import model_of, served, target_rig

AUSTEN = Path(small_model.__file__).parent / "orca-austen"
OLD = MODEL
NEW = replace(MODEL, name="newer", revision="r2", max_model_len=100)
OLD_TEXT, NEW_TEXT = " said the old one", " said the new one"
MESSAGES = [{"role": "user", "content": "the fox"}]


@functools.cache
def new_tokenizer() -> Tokenizer:
    """Its alphabet stands backwards, so that not one token is that of the old model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    inner = tokenizers.Tokenizer(models.BPE({token: place for place, token in enumerate(["<|end|>", *alphabet])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return Tokenizer(
        inner,
        decoder=orjson.loads(inner.to_str())["decoder"],
        named_special_tokens={"eos_token": "<|end|>"},
        chat_template="{% for message in messages %}NEW {{ message['content'] }}{% endfor %}",
    )


@dataclass
class Change:
    """A gateway started for the new model while the old one is in force, and a group of each."""

    one: Rig
    pool: MemoryPool
    old: FakeScheduler
    new: FakeScheduler
    generation: int = 1

    async def put_in_force(self, revision: str) -> None:
        self.generation += 1
        assert await self.pool.set_revision(revision, self.generation) == revision

    async def told(self, revision: str) -> None:
        """Wait until the gateway has heard of it by itself."""

        async def has_heard() -> bool:
            return bool((await self.one.client.get("/ready")).json()["revision"] == revision)

        await until(has_heard)


@contextlib.asynccontextmanager
async def change() -> AsyncIterator[Change]:
    pool = MemoryPool(WallClock())
    await pool.set_revision(OLD.revision, 1)
    for revision, slots in ((OLD.revision, SLOTS), (NEW.revision, 80)):
        await pool.promise_slots(revision, slots)
    settings = GatewaySettings(model="newer")
    old = FakeScheduler(pool, OLD.revision, "old", answer=lambda _: tokenizer().encode(OLD_TEXT))
    new = FakeScheduler(pool, NEW.revision, "new", answer=lambda _: new_tokenizer().encode(NEW_TEXT))
    others = [ServedModel.of(OLD, tokenizer(), settings)]
    newest = ServedModel.of(NEW, new_tokenizer(), settings)
    async with rig(settings=settings, pool=pool, newest=newest, others=others, schedules=False) as one:
        tasks = [asyncio.create_task(each.run()) for each in (old, new)]
        try:
            yield Change(one, pool, old, new)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def call(one: Rig, **body: Any) -> dict[str, Any]:
    return await one.complete(**{"max_tokens": 30, **body})


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


async def test_while_the_model_is_replaced_and_restored_no_call_fails_and_each_has_one_model() -> None:
    async with change() as both:
        calls = []
        for revision in (NEW.revision, OLD.revision, NEW.revision):
            calls += [asyncio.create_task(call(both.one)) for _ in range(20)]
            await asyncio.sleep(0)
            await both.put_in_force(revision)
            calls += [asyncio.create_task(call(both.one)) for _ in range(20)]
            await asyncio.wait(calls)
        found = {(answer["model"], text_of(answer)) for answer in await asyncio.gather(*calls)}
        assert found == {(OLD.name, OLD_TEXT), (NEW.name, NEW_TEXT)}


async def test_a_call_is_encoded_for_the_old_model_until_the_pool_reports_the_new_one() -> None:
    async with change() as both:
        both.old.may_run.clear()
        posted = asyncio.create_task(call(both.one, prompt="the fox"))
        await until(lambda: both.pool.state.records)
        (record,) = both.pool.state.records.values()
        assert (record.request.revision, record.request.prompt) == ("r1", tuple(tokenizer().encode("the fox")))
        both.old.may_run.set()
        assert text_of(await posted) == OLD_TEXT


async def test_token_ids_for_the_old_model_are_not_run_by_the_new_one() -> None:
    async with change() as both:
        prompt = tokenizer().encode("the fox")
        assert text_of(await call(both.one, model=OLD.name, prompt=prompt)) == OLD_TEXT
        await both.put_in_force(NEW.revision)
        answer = await both.one.post("/v1/completions", model=OLD.name, prompt=prompt)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_replaced")
        assert text_of(await call(both.one, model=NEW.name, prompt=new_tokenizer().encode("the fox"))) == NEW_TEXT


async def test_a_chat_just_after_the_change_uses_the_new_template() -> None:
    async with change() as both:
        await both.told(OLD.revision)
        await both.put_in_force(NEW.revision)
        answer = await both.one.chat(messages=MESSAGES, max_tokens=30, return_token_ids=True)
        assert answer["prompt_token_ids"] == new_tokenizer().encode("NEW the fox", add_special_tokens=False)
        assert answer["choices"][0]["message"]["content"] == NEW_TEXT


async def test_a_stream_of_the_old_model_keeps_its_tokenizer_after_the_change() -> None:
    async with change() as both:
        both.old.turns_left = 3
        streaming = asyncio.create_task(both.one.post("/v1/completions", prompt="a", max_tokens=30, stream=True))
        await until(lambda: any(len(record.log) == 3 for record in both.pool.state.records.values()))
        await both.put_in_force(NEW.revision)
        assert text_of(await call(both.one)) == NEW_TEXT
        both.old.turns_left = None
        both.old.may_run.set()
        chunks = [data for _, data in events((await streaming).text)]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == OLD_TEXT


async def test_answers_of_the_old_model_are_decoded_by_its_tokenizer_after_the_change() -> None:
    async with change() as both:
        answer = await call(both.one)
        await both.put_in_force(NEW.revision)
        await both.told(NEW.revision)
        path, client = f"/v1/requests/{answer['id']}", both.one.client
        assert (await client.get(path)).json()["choices"][0]["text"] == OLD_TEXT
        assert (await client.get(f"{path}/result")).json() == answer
        streamed = [data for _, data in events((await client.get(f"{path}/events")).text)]
        assert "".join(data["choices"][0]["text"] for data in streamed[:-1]) == OLD_TEXT
        assert (await client.delete(path)).json()["choices"][0]["text"] == OLD_TEXT


async def test_a_call_repeated_under_its_key_after_the_change_gets_its_first_answer() -> None:
    async with change() as both:
        body, headers = {"prompt": "a", "max_tokens": 30, "seed": 1}, {"idempotency-key": "k"}
        first = await both.one.client.post("/v1/completions", json=body, headers=headers)
        await both.put_in_force(NEW.revision)
        again = await both.one.client.post("/v1/completions", json=body, headers=headers)
        assert (text_of(first.json()), again.content) == (OLD_TEXT, first.content)


async def test_every_model_name_means_the_current_model_and_only_that_is_listed() -> None:
    async with change() as both:
        for revision, model in ((OLD.revision, OLD), (NEW.revision, NEW)):
            if revision != both.pool.state.revision:
                await both.put_in_force(revision)
            await both.told(revision)
            for name in (OLD.name, NEW.name, None):
                assert (await call(both.one, model=name))["model"] == model.name
            listed = (await both.one.client.get("/v1/models")).json()["data"]
            assert [(each["id"], each["max_model_len"]) for each in listed] == [(model.name, model.max_model_len)]
        assert (await both.one.error("/v1/completions", prompt="a", model="none"))[1]["code"] == "model_not_found"


async def test_limits_tokens_and_readiness_are_those_of_the_current_model() -> None:
    async with change() as both:
        await both.told(OLD.revision)
        long = {"prompt": [5] * 90, "max_tokens": 40}
        assert (await call(both.one, **long))["usage"]["prompt_tokens"] == 90
        await both.put_in_force(NEW.revision)
        await both.told(NEW.revision)
        assert (await both.one.error("/v1/completions", **long))[1]["code"] == "context_length_exceeded"
        told = (await both.one.client.get("/ready")).json()
        assert (told["ready"], told["model"], told["max_total_tokens"]) == (True, NEW.name, 80)
        tokens = (await both.one.post("/tokenize", prompt="the fox")).json()
        assert tokens["tokens"] == new_tokenizer().encode("the fox")
        assert (await both.one.post("/detokenize", tokens=tokens["tokens"])).json() == {"prompt": "the fox"}


async def test_the_longest_request_that_fits_is_reported_as_it_changes() -> None:
    async with change() as both:
        await both.told(OLD.revision)
        for before, slots in ((SLOTS, SLOTS // 2), (SLOTS // 2, SLOTS + 16)):
            assert await both.pool.set_promise(OLD.revision, slots, expected=before) == slots

            async def is_told(slots: int = slots) -> bool:
                return bool((await both.one.client.get("/ready")).json()["max_total_tokens"] == slots)

            await until(is_told)


async def test_a_gateway_without_the_model_leaves_calls_to_gateways_that_have_it() -> None:
    async with change() as both:
        answer = await call(both.one)
        await both.pool.promise_slots("r3", SLOTS)
        await both.put_in_force("r3")
        status, error = await both.one.error("/v1/completions", prompt="a")
        assert (status, error["code"]) == (503, "revision_not_served")
        assert (await both.one.client.get(f"/v1/requests/{answer['id']}")).status_code == 200


async def test_a_call_is_refused_if_the_current_model_changes_with_each_try(monkeypatch: pytest.MonkeyPatch) -> None:
    async with change() as both:
        submit, tries = both.pool.submit, []

        async def swapping(wanted: Any) -> Any:
            tries.append(wanted.requests[0].revision)
            await both.put_in_force(OLD.revision if tries[-1] == NEW.revision else NEW.revision)
            return await submit(wanted)

        monkeypatch.setattr(both.pool, "submit", swapping)
        status, error = await both.one.error("/v1/completions", prompt="a")
        assert (status, error["code"], len(tries)) == (503, "revision_not_served", 3)


def test_an_older_model_that_cannot_be_read_is_left_out_and_the_rest_is_served(tmp_path: Path) -> None:
    other = OtherModel(folder=str(AUSTEN), name="b", dtype="bfloat16", quantization="int8")
    words = [OtherModel(folder=str(tmp_path / "gone")), other]
    settings = GatewaySettings(model="a", other_models=tuple(word.to_text() for word in words))
    (found,) = load_others(settings)
    assert (found.info.name, found.info.dtype, found.info.folder) == ("b", "bfloat16", AUSTEN)
    assert found.info.quantization == "int8"


@pytest.mark.parametrize(
    "other",
    [
        OtherModel(folder="/models/a", quantization="int8"),
        OtherModel(folder="/models/a b,c?d", name="owner/name, and=more", dtype="float16", max_model_len=512),
    ],
)
def test_the_setting_of_an_older_model_is_read_as_written_and_has_no_comma(other: OtherModel) -> None:
    assert OtherModel.from_text(other.to_text()) == other
    assert "," not in other.to_text()


@pytest.mark.parametrize(
    "word", ["?name=a", "/a?dtype=int3", "/a?quantization=int3", "/a?max_model_len=x", "/a?seed=1", "/a?name"]
)
def test_an_invalid_setting_of_an_older_model_stops_the_start(word: str) -> None:
    with pytest.raises(SettingError, match="--other-models"):
        parse_settings(["--model", "a", "--other-models", word], {})


TARGETS = model_of("t5", revision="r3")


@contextlib.asynccontextmanager
async def change_of_kind() -> AsyncIterator[Rig]:
    """A gateway of a decoder-only model, in force, and an encoder-decoder model; both have groups."""
    pool = MemoryPool(WallClock())
    await pool.set_revision(OLD.revision, 1)
    for revision in (OLD.revision, TARGETS.revision):
        await pool.promise_slots(revision, SLOTS)
    schedulers = [
        FakeScheduler(pool, OLD.revision, "old", answer=lambda _: tokenizer().encode(OLD_TEXT)),
        FakeScheduler(pool, TARGETS.revision, "new", answer=lambda _: (5, 1), eos_ids=(1,)),
    ]
    others = [ServedModel.of(OLD, tokenizer(), GatewaySettings(model="tiny"))]
    async with rig(pool=pool, newest=served(TARGETS), others=others, schedules=False) as one:
        tasks = [asyncio.create_task(each.run()) for each in schedulers]
        one.app.state.gateway.models.set_current(OLD.revision)
        try:
            yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


OF_OLD: list[dict[str, Any]] = [
    {"prompt": "a", "echo": True, "logprobs": 1},
    {"prompt": "a", "echo": True, "max_tokens": 0},
    {"prompt": "a", "max_tokens": 150},
    {"prompt": [310]},
    {"prompt": "a", "stop_token_ids": [310]},
    {"messages": MESSAGES},
]
"""Calls that only the decoder-only model serves: it has more positions, more token ids, and a template."""


async def of_either(one: Rig, body: dict[str, Any], **headers: str) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return await one.client.post(path, json=body, headers=headers)


def believe(one: Rig, revision: str) -> None:
    """Let the gateway be as late as one that polled the pool a moment ago."""
    backlog = one.app.state.gateway.overload.backlog
    backlog._polled_s = backlog._clock_s()
    one.app.state.gateway.models.set_current(revision)


@pytest.mark.parametrize("body", OF_OLD, ids=str)
async def test_a_model_that_was_replaced_a_moment_ago_refuses_nothing(body: dict[str, Any]) -> None:
    async with change_of_kind() as one:
        believe(one, TARGETS.revision)
        assert (await of_either(one, body)).status_code == 200
        assert await one.pool.set_revision(TARGETS.revision, 2) == TARGETS.revision
        assert (await of_either(one, body)).status_code == 400
        prefixed = {"prompt": "a", "decoder_prefix": "the"}
        believe(one, OLD.revision)
        assert (await of_either(one, prefixed)).status_code == 200
        assert await one.pool.set_revision(OLD.revision, 3) == OLD.revision
        status, error = error_of(await of_either(one, prefixed))
        assert (status, error["param"]) == (400, "decoder_prefix")


@pytest.mark.parametrize("body", OF_OLD, ids=str)
async def test_a_repeated_call_that_the_new_model_refuses_gets_its_first_answer(body: dict[str, Any]) -> None:
    async with change_of_kind() as one:
        first = await of_either(one, body, **{"idempotency-key": "k"})
        await one.pool.set_revision(TARGETS.revision, 2)
        again = await of_either(one, body, **{"idempotency-key": "k"})
        assert (first.status_code, again.content) == (200, first.content)
        assert (await of_either(one, body, **{"idempotency-key": "other"})).status_code == 400
        status, error = error_of(await of_either(one, {**body, "seed": 1}, **{"idempotency-key": "k"}))
        assert (status, error["code"]) == (422, "idempotency_key_reused")


async def test_token_ids_for_the_old_model_that_are_repeated_under_their_key_get_their_first_answer() -> None:
    async with change() as both:
        body = {"model": OLD.name, "prompt": tokenizer().encode("the fox"), "max_tokens": 30}
        first = await both.one.client.post("/v1/completions", json=body, headers={"idempotency-key": "k"})
        await both.put_in_force(NEW.revision)
        again = await both.one.client.post("/v1/completions", json=body, headers={"idempotency-key": "k"})
        assert (text_of(first.json()), again.content) == (OLD_TEXT, first.content)


async def test_a_refusal_by_a_model_is_no_answer_of_a_model_that_this_gateway_does_not_have() -> None:
    async with change_of_kind() as one:
        await one.pool.promise_slots("r9", SLOTS)
        await one.pool.set_revision("r9", 2)
        status, error = error_of(await of_either(one, {"prompt": [10**6]}))
        assert (status, error["code"]) == (503, "revision_not_served")


async def test_an_encoder_decoder_model_needs_the_schema_of_its_requests() -> None:
    async with target_rig() as (one, _):
        await one.pool.set_schema(2)
        status, error = await one.error("/v1/completions", prompt="a")
        assert (status, error["code"], error["param"]) == (503, "newer_schema_needed", None)
        assert "orca pool schema 3, with the --data of orca up" in error["message"]
        await one.pool.set_schema(3)
        await one.complete(prompt="a")


async def test_a_call_learns_what_keeps_an_encoder_decoder_model_from_taking_over() -> None:
    async with target_rig() as (one, _):
        await one.pool.promise_slots("r9", SLOTS)
        await one.pool.set_revision("r9", 2)
        status, error = await one.error("/v1/completions", prompt="a")
        assert (status, error["code"]) == (503, "revision_not_served")
        await one.pool.set_schema(2)
        status, error = await one.error("/v1/completions", prompt="a")
        assert (status, error["code"]) == (503, "newer_schema_needed")
