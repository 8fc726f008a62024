"""The life of a call: receive, check, tokenize, submit; then delivery.py answers it and call_summary.py looks back."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from orca.core.domain.errors import NeverFits, NotInForce, Overloaded, PoolUnavailable, QueueFull, UnknownRequest
from orca.core.domain.request import Request as OrcaRequest
from orca.gateway.answer.delivery import Accepted, StreamDelivery, Timing, WholeDelivery
from orca.gateway.answer.tracing import CallSpan
from orca.gateway.calls.accept import SEEDS, Call, chat_prompt, completion_prompts, submission
from orca.gateway.calls.bodies import ChatBody, CompletionBody
from orca.gateway.calls.idempotency import body_digest, idempotency_key, keyed_name
from orca.gateway.errors import UNAVAILABLE, ApiError
from orca.gateway.gateway import Gateway
from orca.gateway.http.receive import Held, receive_body
from orca.gateway.latency_goals import NO_GOALS, SCHEMA_LEAST, TTFT_HEADER, Goals, read_goals
from orca.gateway.limits.auth import key_of, owner_of
from orca.gateway.models.models import Served
from orca.gateway.render.render import Reading, Rendering
from orca.gateway.routes.call_summary import note_closed
from orca.gateway.routes.request_state import describe, describe_new, state_answer
from orca.pool.api import RequestPool
from orca.pool.records import Parent, Submission

log = logging.getLogger(__name__)

COMPLETIONS, CHAT = PATHS = "/v1/completions", "/v1/chat/completions"
"""Of the calls that generate."""

TAKE_BACK_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Between tries: a submit whose answer was lost may reach a slow pool a little after it was given up."""

MODELS_TRIED_MAX = 3
"""For one call. A second one where the model has just been replaced, a third where that was taken back at once."""

CallBody = TypeVar("CallBody", CompletionBody, ChatBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What is known of a call before its body."""

    started: float  # on the clock of `time.perf_counter`
    goals: Goals


Encode = Callable[[Served], Awaitable[list[list[int]]]]
"""A call's prompts as token ids of a model. Raises: ApiError, InvalidRequest."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A call's prompts for the model that is in force as far as this gateway knows."""

    served: Served
    prompts: list[list[int]]
    encode: Encode  # for another one, should that be in force by then

    @classmethod
    async def by(cls, encode: Encode, served: Served) -> "Encoded":
        return cls(served, await encode(served), encode)


async def complete(gateway: Gateway, http: HttpRequest) -> Response:
    """/v1/completions. Raises: ApiError, OrcaError; then nothing was accepted."""
    with gateway.intake.call() as held:
        opened, body = await _receive(gateway, http, CompletionBody, held)
        return await _generate(gateway, http, body, partial(_encode_prompts, gateway, body), opened, prefix="cmpl")


async def chat(gateway: Gateway, http: HttpRequest) -> Response:
    """/v1/chat/completions. Raises: ApiError, OrcaError; then nothing was accepted."""
    with gateway.intake.call() as held:
        opened, body = await _receive(gateway, http, ChatBody, held)
        return await _generate(gateway, http, body, partial(_encode_chat, gateway, body), opened, prefix="chatcmpl")


async def _encode_prompts(gateway: Gateway, body: CompletionBody, served: Served) -> list[list[int]]:
    add_special_tokens = body.add_special_tokens is not False
    prompts = completion_prompts(body, served, gateway.settings)
    if body.model not in (None, served.info.name) and any(isinstance(prompt, list) for prompt in prompts):
        # Text means the same to any model, ids do not.
        message = f"the prompt is token ids for {body.model!r}, but {served.info.name!r} serves by now"
        raise ApiError(409, message, param="prompt", code="model_replaced")
    return [
        prompt
        if isinstance(prompt, list)
        else await served.encoder.prompt(prompt, param="prompt", add_special_tokens=add_special_tokens)
        for prompt in prompts
    ]


async def _encode_chat(gateway: Gateway, body: ChatBody, served: Served) -> list[list[int]]:
    text = await chat_prompt(body, served, gateway.settings)
    # Templates write special tokens out.
    add_special_tokens = body.add_special_tokens is True
    return [await served.encoder.prompt(text, param="messages", add_special_tokens=add_special_tokens)]


async def _receive(gateway: Gateway, http: HttpRequest, model: type[CallBody], held: Held) -> tuple[Opened, CallBody]:
    """A call's body, and what is known without it. Raises: ApiError, OrcaError; for the load without having read it."""
    opened = await _open(gateway, http)
    body = await receive_body(http, model, gateway.settings, held)
    async with _unless_known(gateway, http):
        # What could not be met anyhow.
        gateway.overload.check_deadline(body.deadline_ms)
        gateway.overload.check_deadline(opened.goals.first_token_deadline_ms, TTFT_HEADER)
    gateway.models.check_name(body.model)
    return opened, body


async def _open(gateway: Gateway, http: HttpRequest) -> Opened:
    """Raises: ApiError, QueueFull, InvalidRequest, without having read the body."""
    gateway.drain.check()
    started = time.perf_counter()
    await _check_load(gateway, http)
    goals = read_goals(http.headers, is_enforced=gateway.settings.slo_enforce)
    are_kept = (gateway.overload.schema or 0) >= SCHEMA_LEAST
    return Opened(started=started, goals=goals if are_kept else NO_GOALS)


async def _generate(
    gateway: Gateway,
    http: HttpRequest,
    body: CompletionBody | ChatBody,
    encode: Encode,
    opened: Opened,
    *,
    prefix: str,
) -> Response:
    """Accept the call inside a span of its own, which ends with the connection, or here."""
    encoded = await Encoded.by(encode, gateway.models.current)
    await _take_further_from_rate(gateway, http, len(encoded.prompts), body.n or 1)
    span = gateway.tracing.start(f"POST {http.url.path}", http.headers)
    try:
        return await _accept(gateway, http, body, encoded, opened, span, prefix=prefix)
    except BaseException as error:
        gateway.tracing.fail(span, error)
        raise


async def _accept(
    gateway: Gateway,
    http: HttpRequest,
    body: CompletionBody | ChatBody,
    encoded: Encoded,
    opened: Opened,
    span: CallSpan,
    *,
    prefix: str,
) -> Response:
    """Submit, and only when the record is durable return the response that will answer."""
    is_background = bool(body.background) or _asks_for_async(http)
    call = _call(gateway, http, body, opened, span, prefix=prefix, is_background=is_background)
    wanted, requests = await _submit_to_current(gateway, body, encoded, call)
    _note_accepted(gateway, http, requests)
    stored = await _stored(gateway, wanted, requests)
    served = model_of(gateway, stored.requests)
    if is_background:
        answer = await _answer_in_background(gateway, http, wanted, stored, served.reading)
        gateway.tracing.finish(span, Timing(opened.started), {"orca.request_id": call.parent})
        return answer
    gateway.readers.add(call.parent, call.reader)
    # Under a key of the client they may be of an earlier call.
    follower = gateway.watcher.follow((request.id for request in requests), are_new=not wanted.digest)
    accepted = Accepted(
        requests=requests,
        rendering=replace(Rendering.from_json(stored.render), event_ids=call.event_ids),
        follower=follower,
        timing=Timing(opened.started),
        # The pool keeps an ended call for longer than its one reader's lease. Under a key others may follow for ever.
        leave=lambda has_ended: gateway.readers.remove(
            call.parent, call.reader, lapses=has_ended and not wanted.digest
        ),
        closed=lambda done, ends: note_closed(gateway, done, ends, span),
    )
    if body.stream:
        return stream(gateway, accepted, served)
    return WholeDelivery(accepted, served.reading, gateway.metrics, gateway.drain)


def stream(gateway: Gateway, accepted: Accepted, served: Served) -> StreamDelivery:
    """Its answer as events."""
    keep_alive_s = gateway.settings.keep_alive_seconds
    return StreamDelivery(accepted, served.reading, gateway.metrics, gateway.drain, keep_alive_s=keep_alive_s)


async def _stored(gateway: Gateway, wanted: Submission, requests: Sequence[OrcaRequest]) -> Parent:
    """What the pool has: under a key of the client it may be of an earlier call. Raises: PoolUnavailable."""
    if not wanted.digest:
        return Parent(
            parent=wanted.parent,
            requests=tuple(requests),
            on_disconnect=wanted.on_disconnect,
            render=wanted.render,
            owner=wanted.owner,
        )
    return await gateway.pool.parent(wanted.parent)


async def _answer_in_background(
    gateway: Gateway, http: HttpRequest, wanted: Submission, stored: Parent, reading: Reading
) -> Response:
    """202 with the request's state. Raises: PoolUnavailable, only for a call that may be repeated under its key."""
    if wanted.digest:
        document = await describe(gateway.pool, reading, stored)
    else:
        document = await describe_new(reading, stored)
    applied = {"preference-applied": "respond-async"} if _asks_for_async(http) else {}
    return state_answer(document, 202, applied)


async def _check_load(gateway: Gateway, http: HttpRequest) -> None:
    """Raises: QueueFull, ApiError 503 when there is no place for a new call; nothing of it was read."""
    async with _unless_known(gateway, http):
        gateway.overload.check_answers(gateway.drain.open_answers)
        key = key_of(http)
        await gateway.overload.check(None if key is None else key.limits.queue_percent)


async def _take_further_from_rate(gateway: Gateway, http: HttpRequest, prompts: int, choices: int) -> None:
    """Raises: ApiError 429, 400: the rate of the call's key is in requests, and its door has counted one."""
    key = key_of(http)
    if key is None or prompts * choices == 1:
        return
    async with _unless_known(gateway, http):
        gateway.keys.take_further(key, prompts * choices, param="n" if choices > 1 else "prompt")


@contextlib.asynccontextmanager
async def _unless_known(gateway: Gateway, http: HttpRequest) -> AsyncIterator[None]:
    """What refuses new calls for load or a key's rate: one that repeats an accepted call takes no place, and passes.

    Only a call that would be refused is looked up in the pool.
    """
    word = idempotency_key(http)
    try:
        yield
    except (QueueFull, ApiError):
        if word is None or not await _is_known(gateway.pool, keyed_name(owner_of(http), word)):
            raise


async def _is_known(pool: RequestPool, parent: str) -> bool:
    try:
        await pool.parent(parent)
    except UnknownRequest:
        return False
    return True


def _call(
    gateway: Gateway,
    http: HttpRequest,
    body: CompletionBody | ChatBody,
    opened: Opened,
    span: CallSpan,
    *,
    prefix: str,
    is_background: bool,
) -> Call:
    owner, key = owner_of(http), idempotency_key(http)
    return Call(
        parent=f"{prefix}-{secrets.token_hex(16)}" if key is None else keyed_name(owner, key),
        reader=secrets.token_hex(8),
        now_ms=gateway.clock_ms(),
        seed=secrets.randbelow(SEEDS),
        event_ids="text/event-stream" in http.headers.get("accept", ""),
        owner=owner,
        digest="" if key is None else body_digest(http.url.path, body),
        is_kept=is_background or key is not None,
        traceparent=span.traceparent,
        goals=opened.goals,
    )


def _asks_for_async(http: HttpRequest) -> bool:
    """RFC 7240: the client would rather be answered before the work is done."""
    wishes = ",".join(http.headers.getlist("prefer")).lower().split(",")
    return any(wish.partition(";")[0].strip() == "respond-async" for wish in wishes)


def _note_accepted(gateway: Gateway, http: HttpRequest, requests: Sequence[OrcaRequest]) -> None:
    for request in requests:
        gateway.metrics.prompt_tokens.observe(len(request.prompt))
        gateway.metrics.prompt_tokens_total.inc(len(request.prompt))
    key = key_of(http)
    said = {"request_id": requests[0].parent, "requests": len(requests), "key": None if key is None else key.name}
    log.info("call accepted", extra=said)


def model_of(gateway: Gateway, requests: Sequence[OrcaRequest]) -> Served:
    """Another model's tokenizer would write other bytes. Raises: ApiError 503: a gateway that has this one can."""
    revision = requests[0].revision
    served = gateway.models.of(revision)
    if served is None:
        raise _not_served(f"the request is of revision {revision}, which this gateway does not serve")
    return served


def _not_served(message: str) -> ApiError:
    return ApiError(503, message, kind=UNAVAILABLE, code="revision_not_served", retry_after_s=1)


async def _submit_to_current(
    gateway: Gateway, body: CompletionBody | ChatBody, encoded: Encoded, call: Call
) -> tuple[Submission, Sequence[OrcaRequest]]:
    """Submit for the model in force. Another one may be by now: then the prompts are encoded for that.

    Raises: ApiError 503 when this gateway does not know it; OrcaError.
    """
    for tries_left in reversed(range(MODELS_TRIED_MAX)):
        call = replace(call, max_total_tokens=gateway.models.max_total_tokens(encoded.served))
        wanted = submission(body, encoded.prompts, encoded.served, gateway.settings, call)
        try:
            return wanted, await _submit(gateway, wanted)
        except NotInForce as error:
            # Not the client's mistake.
            if not tries_left or error.in_force is None or not gateway.models.put_in_force(error.in_force):
                raise _not_served(str(error)) from error
            encoded = await Encoded.by(encoded.encode, gateway.models.current)
        except NeverFits as error:
            # Where the client named no length, it gets what fits by now.
            if not tries_left or not gateway.models.note_promise(encoded.served, error.promised):
                raise
    raise AssertionError("the last try returns or raises")


async def _submit(gateway: Gateway, wanted: Submission) -> Sequence[OrcaRequest]:
    """Submit, and once more under the same name when the answer was lost: it may have happened."""
    try:
        try:
            return await gateway.pool.submit(wanted)
        except PoolUnavailable:
            return await gateway.pool.submit(wanted)
    except PoolUnavailable:
        if not wanted.digest:
            gateway.finish(_take_back(gateway.pool, wanted.parent))
        raise
    except Overloaded as error:
        if isinstance(error, QueueFull) and len(wanted.requests) == 1:
            gateway.overload.note_full()
        raise gateway.overload.refusal(error, wanted.parent) from None


async def _take_back(pool: RequestPool, parent: str) -> None:
    """Cancel what may have been stored for a call that was told it is not: its client never learns of its name."""
    for wait_s in TAKE_BACK_SECONDS:
        await asyncio.sleep(wait_s)
        with contextlib.suppress(PoolUnavailable):
            await pool.cancel(parent)
            return
    log.warning("a refused call may run, for the pool did not answer", extra={"request_id": parent})
