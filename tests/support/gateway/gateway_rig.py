"""The parts of a gateway under test: a tiny tokenizer, a pool in memory, and a scheduler that answers by script."""

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import tokenizers
from fastapi import FastAPI, routing
from tokenizers import decoders, models, pre_tokenizers, trainers

from orca.core.domain.model import ModelInfo
from orca.core.domain.request import End, FinishReason, Logprob, Request, SamplingParams, Token
from orca.core.domain.text import OutputText, Tokenizer
from orca.gateway.answer.tracing import Tracing
from orca.gateway.app import create_app
from orca.gateway.errors import MESSAGE_CHARACTERS_MAX, PARAM_CHARACTERS_MAX
from orca.gateway.models.models import Models, ServedModel
from orca.gateway.settings import GatewaySettings
from orca.pool.api import RequestPool
from orca.pool.memory.pool import MemoryPool
from orca.pool.order.order_rules import ClaimOrder
from orca.pool.records import Caller, Claimed, CommitAnswer, CommitEntry
from orca.pool.settings import PoolSettings
from orca.scheduler.policy.finish import FinishDetector
from support import waiting

TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
WORDS = " Hello, wörld 🐋 and more."

# FastAPI makes a validator for each answer that each route of each app may give. This takes nine tenths of the time of
# a rig, though the validators are the same in all apps.
routing.create_model_field = functools.cache(routing.create_model_field)


@functools.cache
def tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
    """Return the tiny tokenizer, trained once."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the quick brown fox says hello to the world and more of the same"] * 3, trainer)
    return Tokenizer(
        inner,
        decoder=orjson.loads(inner.to_str())["decoder"],
        named_special_tokens={"eos_token": "<|end|>"},
        chat_template=chat_template,
    )


def eos() -> int:
    """Return the token id of the end of a sequence."""
    return tokenizer().encode("<|end|>")[0]


def ids(text: str) -> tuple[int, ...]:
    """Return the token ids of a text."""
    return tuple(tokenizer().encode(text))


MODEL = ModelInfo(
    folder=Path("tiny"),
    name="tiny",
    revision="r1",
    architecture="gpt2",
    dtype="float32",
    vocab_size=320,
    max_model_len=200,
    num_layers=1,
    bos_token_id=None,
    eos_token_ids=(0,),
)


SLOTS = 160
"""Slots of the scheduler's group: fewer than the model's context."""


class WallClock:
    """The real one; tests that need another time say so."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


@dataclass
class FakeScheduler:
    """Owns every request at once and gives each, turn by turn, the tokens of its script."""

    pool: RequestPool
    revision: str = MODEL.revision
    group: str = "g0"
    answer: Callable[[Request], Sequence[int]] = lambda _: ids(WORDS)
    reason: FinishReason | None = None  # a forced reason of the end
    detail: str | None = None  # why a request is refused, with the reason REFUSED
    tokens_per_turn: int = 1
    batch_size_max: int = 10**6
    order: ClaimOrder | None = None  # of its claims; None is that of arrival
    turn_seconds: float = 0.0  # between two turns
    tokenizer: Tokenizer | None = None  # None: the tiny one
    eos_ids: tuple[int, ...] | None = None  # None: that of the tiny one
    block_tokens: int | None = None  # that it states to the pool
    cached: Callable[[Request], int | None] = lambda _: None  # prompt tokens that it need not compute
    may_run: asyncio.Event = field(default_factory=asyncio.Event)
    turns_left: int | None = None  # None: no bound
    running: dict[str, tuple[Claimed, list[Token], End]] = field(default_factory=dict)

    async def run(self) -> None:
        caller = Caller(group=self.group, process="p0", revision=self.revision)
        self.may_run.set()
        call = 1
        await self.pool.enter(caller, call, reported_epoch=0)
        if self.block_tokens is not None:
            await self.pool.state_block_tokens(caller, self.block_tokens)
        while True:
            call += 1
            await self.pool.heartbeat(caller)
            given = await self.pool.claim(
                caller,
                call,
                free_slots=10**6,
                total_slots=10**6,
                block_tokens=16,
                most=self.batch_size_max - len(self.running),
                order=self.order,
            )
            for claimed in given.claimed:
                self.running[claimed.request.id] = (claimed, *self._script(claimed.request))
            if not self.running:
                await self.pool.wait_for_work(self.revision, 0.05)
            await self.may_run.wait()
            if self.turns_left is not None and self.running:
                if self.turns_left == 0:
                    # Paused, it makes no pool calls at all.
                    self.may_run.clear()
                    await self.may_run.wait()
                    continue
                self.turns_left -= 1
            await self._turn()
            await asyncio.sleep(self.turn_seconds)

    async def _turn(self) -> None:
        entries = []
        for request_id, (claimed, tokens, end) in list(self.running.items()):
            now, later = tokens[: self.tokens_per_turn], tokens[self.tokens_per_turn :]
            index = end.count - len(tokens)
            entries.append(
                CommitEntry(
                    request_id=request_id,
                    claim=claimed.claim,
                    index=index,
                    tokens=tuple(now),
                    end=None if later else end,
                )
            )
            if later:
                self.running[request_id] = (claimed, later, end)
            else:
                del self.running[request_id]
        if entries:
            answers = await self.pool.commit(entries)
            for entry, answer in zip(entries, answers, strict=True):
                if answer in (CommitAnswer.ENDED, CommitAnswer.NOT_YOURS):
                    self.running.pop(entry.request_id, None)

    def _script(self, request: Request) -> tuple[list[Token], End]:
        tokens, end = scripted(request, self.answer(request), self.tokenizer, self.eos_ids)
        tokens[:1] = [token._replace(cached_prompt_tokens=self.cached(request)) for token in tokens[:1]]
        return tokens, end if self.reason is None else replace(end, reason=self.reason, stop=None, detail=self.detail)


def scripted(
    request: Request, answer: Sequence[int], own: Tokenizer | None = None, eos_ids: tuple[int, ...] | None = None
) -> tuple[list[Token], End]:
    """The log that a request gets when the model would go on with `answer`; the scheduler's own rule ends it."""
    output_text = functools.partial(OutputText.of, own or tokenizer())
    ending, tokens = FinishDetector(request, (eos(),) if eos_ids is None else eos_ids, output_text), []
    for index, token_id in enumerate(answer):
        tokens.append(_token(request, index, token_id))
        if (end := ending.push(token_id)) is not None:
            return tokens, end
    return tokens, End(FinishReason.LENGTH, len(tokens))


def _token(request: Request, index: int, token_id: int) -> Token:
    def scored(one: int, top: int | None) -> Logprob:
        return Logprob(one, -0.5 - one / 1000, tuple((one + i, -0.5 - i) for i in range(top or 0)))

    sampling = request.sampling
    return Token(
        token_id,
        None if sampling.logprobs is None else scored(token_id, sampling.logprobs),
        tuple(scored(one, sampling.prompt_logprobs) for one in request.prompt[1:])
        if index == 0 and sampling.prompt_logprobs is not None
        else (),
    )


@dataclass
class Rig:
    """A gateway under test with a pool in memory and a fake scheduler, and clients for it."""

    app: FastAPI
    pool: MemoryPool
    scheduler: FakeScheduler
    client: httpx.AsyncClient

    async def post(self, path: str, /, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", **{"prompt": "the fox", "max_tokens": 50, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def chat(self, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "the fox"}]
        response = await self.post("/v1/chat/completions", **{"messages": messages, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def error(self, path: str, /, **body: Any) -> tuple[int, dict[str, Any]]:
        return error_of(await self.post(path, **body))


NAMED_CODES = ("invalid_value", "invalid_cursor", "invalid_idempotency_key")
"""Codes of errors whose message begins with the field or header at fault."""


def error_of(response: httpx.Response) -> tuple[int, dict[str, Any]]:
    """Status and error of a response, which must be in OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    if body["error"]["code"] in NAMED_CODES:
        param = body["error"]["param"]
        assert body["error"]["message"].startswith(f"{param}: " if len(param) < PARAM_CHARACTERS_MAX else param[:-3])
    assert response.headers["content-type"] == "application/json"
    return response.status_code, body["error"]


def check_refusal(response: httpx.Response) -> str:
    """Exactly OpenAI's shape, with words in it and nothing of our insides. Returns: its code."""
    _, error = error_of(response)
    assert 0 < len(error["message"]) <= MESSAGE_CHARACTERS_MAX
    assert error["type"]
    assert error["code"]
    assert error["param"] is None or 0 < len(error["param"]) <= PARAM_CHARACTERS_MAX
    assert not any(inside in response.text for inside in ("Traceback", '.py"', "site-packages", "0x7f", "pydantic"))
    return str(error["code"])


@contextlib.asynccontextmanager
async def rig(
    *,
    settings: GatewaySettings | None = None,
    pool: MemoryPool | None = None,
    pool_settings: PoolSettings | None = None,
    model: ModelInfo = MODEL,
    newest: ServedModel | None = None,
    others: Sequence[ServedModel] = (),
    chat_template: str | None = TEMPLATE,
    schedules: bool = True,
    slots: int = SLOTS,
    runs_tasks: bool = True,
    make_scheduler: Callable[[RequestPool], FakeScheduler] = FakeScheduler,
    tracing: Tracing | None = None,
) -> AsyncIterator[Rig]:
    """A gateway and, unless `schedules` is off, a scheduler behind it.

    Args:
        slots: that the pool promises to one request.
        newest: what the gateway serves, in place of `model` with `chat_template`.
        make_scheduler: makes the scheduler for the gateway's pool.
        runs_tasks: off where a server runs the application with its lifespan.
    """
    pool = pool or MemoryPool(WallClock(), pool_settings)
    if schedules:
        await pool.set_revision(model.revision, 0)
        await pool.promise_slots(model.revision, slots)
    # A grammar may take a busy machine long to build.
    settings = settings or GatewaySettings(model="tiny", grammar_seconds_max=60.0)
    newest = newest or ServedModel.of(model, tokenizer(chat_template), settings)
    app = create_app(pool, Models(newest, others), settings, tracing=tracing or Tracing(None))
    # Its clients compute in the same loop: what makes it late here is the test.
    app.state.gateway.overload.lag.most_seconds = math.inf
    scheduler = make_scheduler(pool)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    lifespan = app.router.lifespan_context(app) if runs_tasks else contextlib.nullcontext()
    async with (
        lifespan,
        httpx.AsyncClient(transport=transport, base_url="http://orca") as client,
    ):
        task = asyncio.create_task(scheduler.run()) if schedules else None
        try:
            # The gateway's first round has told the pool its revision.
            if runs_tasks:
                await until(lambda: pool.state.revision and (app.state.gateway.models.has_formed or not schedules))
            yield Rig(app, pool, scheduler, client)
        finally:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


until = functools.partial(waiting.until, limit_s=60.0)


def events(text: str | bytes) -> Iterator[tuple[str | None, Any]]:
    """(id, data) of each event of a stream; data is parsed, `[DONE]` is a string."""
    for block in (text.decode() if isinstance(text, bytes) else text).split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        yield fields.get("id"), data if data == "[DONE]" else orjson.loads(data)


def recording(found: list[Request], text: str = "a") -> Callable[[Request], Sequence[int]]:
    """An answer that notes the requests it is asked for."""

    def answer(request: Request) -> Sequence[int]:
        found.append(request)
        return ids(text)

    return answer


def make_request(text: str = "the fox", *, choice: int = 0, max_new_tokens: int = 50, **sampling: Any) -> Request:
    """Return a request with this prompt, as a gateway would submit it."""
    return Request(
        parent="p",
        choice=choice,
        revision=MODEL.revision,
        prompt=ids(text),
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(**sampling),
    )


async def turns_during(work: Coroutine[Any, Any, Any]) -> int:
    """Return how many loop iterations other tasks had during the work."""
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    await work
    others.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await others
    return turns
