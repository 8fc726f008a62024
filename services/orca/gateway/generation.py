"""The life of a call in the gateway: receive, check, tokenize, submit, deliver.

The parts of the process that calls share are in `Gateway`; nothing of a call outlives its connection.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest

from orca.core.errors import InvalidRequest, NeverFits, Overloaded, PoolUnavailable, QueueFull
from orca.core.request import End
from orca.core.request import Request as OrcaRequest
from orca.gateway.accept import SEEDS, Call, Served, chat_prompt, check_model, completion_prompts, submission
from orca.gateway.auth import key_of
from orca.gateway.bodies import ChatBody, CompletionBody
from orca.gateway.delivery import Accepted, Delivery, StreamDelivery, Timing, WholeDelivery
from orca.gateway.drain import Drain
from orca.gateway.encoding import Encoder
from orca.gateway.errors import UNAVAILABLE, ApiError
from orca.gateway.key_ring import KeyRing
from orca.gateway.metrics import Metrics
from orca.gateway.overload import Overload
from orca.gateway.readers import Readers
from orca.gateway.receive import receive_body
from orca.gateway.render import Reading, Rendering
from orca.gateway.settings import Settings
from orca.gateway.tracing import CallSpan, Tracing
from orca.gateway.watcher import LogWatcher
from orca.pool.api import Pool, Submission

log = logging.getLogger(__name__)


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True, kw_only=True)
class Gateway:
    """What all calls of a process share."""

    pool: Pool
    served: Served
    settings: Settings
    clock_ms: Callable[[], int]
    metrics: Metrics
    tracing: Tracing
    watcher: LogWatcher
    readers: Readers
    reading: Reading
    encoder: Encoder
    keys: KeyRing
    overload: Overload
    drain: Drain = field(default_factory=Drain)
    # Promised by the first group of our revision that was formed; None until then, and never None again.
    slots: int | None = None
    finishing: set[asyncio.Task[None]] = field(default_factory=set)


async def complete(gateway: Gateway, http: HttpRequest) -> Delivery:
    """/v1/completions. Raises: ApiError, OrcaError; then nothing was accepted."""
    gateway.drain.check()
    started = time.perf_counter()
    await _check_load(gateway, http)
    body = await receive_body(http, CompletionBody, gateway.settings)
    gateway.overload.check_deadline(body.deadline_ms)
    check_model(body.model, gateway.served)
    prompts = completion_prompts(body, gateway.served, gateway.settings)
    add_special_tokens = body.add_special_tokens is not False
    ids = [
        prompt
        if isinstance(prompt, list)
        else await gateway.encoder.prompt(prompt, param="prompt", add_special_tokens=add_special_tokens)
        for prompt in prompts
    ]
    return await _generate(gateway, http, body, ids, started, prefix="cmpl")


async def chat(gateway: Gateway, http: HttpRequest) -> Delivery:
    """/v1/chat/completions. Raises: ApiError, OrcaError; then nothing was accepted."""
    gateway.drain.check()
    started = time.perf_counter()
    await _check_load(gateway, http)
    body = await receive_body(http, ChatBody, gateway.settings)
    gateway.overload.check_deadline(body.deadline_ms)
    check_model(body.model, gateway.served)
    text = chat_prompt(body, gateway.served, gateway.settings)
    # Templates write special tokens out.
    add_special_tokens = body.add_special_tokens is True
    ids = await gateway.encoder.prompt(text, param="messages", add_special_tokens=add_special_tokens)
    return await _generate(gateway, http, body, [ids], started, prefix="chatcmpl")


async def _generate(
    gateway: Gateway,
    http: HttpRequest,
    body: CompletionBody | ChatBody,
    prompts: Sequence[Sequence[int]],
    started: float,
    *,
    prefix: str,
) -> Delivery:
    """Submit, and only when the record is durable return the response that will answer."""
    span = gateway.tracing.start(f"POST {http.url.path}", http.headers)
    call = Call(
        parent=f"{prefix}-{secrets.token_hex(16)}",
        reader=secrets.token_hex(8),
        now_ms=gateway.clock_ms(),
        seed=secrets.randbelow(SEEDS),
        slots=gateway.slots,
        event_ids="text/event-stream" in http.headers.get("accept", ""),
        traceparent=span.traceparent,
    )
    wanted = submission(body, prompts, gateway.served, gateway.settings, call)
    requests = await _submit(gateway, wanted)
    gateway.readers.add(call.parent, call.reader)
    for request in requests:
        gateway.metrics.prompt_tokens.observe(len(request.prompt))
        gateway.metrics.prompt_tokens_total.inc(len(request.prompt))
    accepted = Accepted(
        requests=requests,
        rendering=Rendering.from_json(wanted.render),
        follower=gateway.watcher.follow(request.id for request in requests),
        timing=Timing(started),
        leave=lambda: gateway.readers.remove(call.parent, call.reader),
        finished=lambda done, ends: _finish_span(gateway, span, done, ends),
    )
    key = key_of(http)
    said = {"request_id": call.parent, "requests": len(requests), "key": None if key is None else key.name}
    log.info("call accepted", extra=said)
    kind = StreamDelivery if body.stream else WholeDelivery
    return kind(accepted, gateway.reading, gateway.metrics, gateway.drain)


async def _check_load(gateway: Gateway, http: HttpRequest) -> None:
    """Raises: QueueFull when there is no place for the call."""
    key = key_of(http)
    await gateway.overload.check(None if key is None else key.limits.queue_percent)


async def _submit(gateway: Gateway, wanted: Submission) -> Sequence[OrcaRequest]:
    """Submit, and once more under the same name when the answer was lost: it may have happened."""
    try:
        try:
            return await gateway.pool.submit(wanted)
        except PoolUnavailable:
            return await gateway.pool.submit(wanted)
    except Overloaded as error:
        if isinstance(error, QueueFull) and len(wanted.requests) == 1:
            gateway.overload.note_full()
        raise gateway.overload.refusal(error, wanted.parent) from None
    except NeverFits:
        raise
    except InvalidRequest as error:
        # All else was checked before: our revision is not, or no longer, the one in force. Not the client's mistake.
        raise ApiError(503, str(error), kind=UNAVAILABLE, code="revision_not_served", retry_after_s=1) from error


def _finish_span(gateway: Gateway, span: CallSpan, accepted: Accepted, ends: Sequence[End]) -> None:
    if span.span is None:
        return
    task = asyncio.create_task(_export_span(gateway, span, accepted, ends))
    gateway.finishing.add(task)
    task.add_done_callback(gateway.finishing.discard)


async def _export_span(gateway: Gateway, span: CallSpan, accepted: Accepted, ends: Sequence[End]) -> None:
    try:
        first_claimed_ms = (await gateway.pool.status(accepted.requests[0].id)).first_claimed_ms
    except Exception:
        log.info("no claim time for a span", extra={"request_id": accepted.parent})
        first_claimed_ms = None
    attributes: dict[str, str | int] = {
        "orca.request_id": accepted.parent,
        "gen_ai.request.model": accepted.rendering.model,
        "gen_ai.usage.output_tokens": sum(end.count for end in ends),
    }
    gateway.tracing.finish(span, accepted.timing, attributes, first_claimed_ms)
