"""The life of a call that generates: receive its body, encode, submit, deliver.

The steps are in other files. The module calls/opened_call.py reads the HTTP request, calls/admission.py refuses for
load, and calls/accept.py and calls/call_grammar.py check the body. Then calls/submit.py submits to the pool,
answer/delivery.py answers, and routes/call_summary.py reports when the connection is over.
"""

import contextlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.responses import Response

from orca.core.api_keys import ApiKey
from orca.core.domain.request import Request
from orca.gateway.answer.delivery import AcceptedCall, CallTiming, StreamDelivery, WholeDelivery
from orca.gateway.answer.offload import render_response
from orca.gateway.answer.tracing import CallSpan
from orca.gateway.calls.accept import SEEDS, CallContext, chat_prompt, chat_tools, completion_prompts
from orca.gateway.calls.admission import check_deadlines, check_priority, take_rest_from_rate
from orca.gateway.calls.bodies import ChatBody, CompletionBody
from orca.gateway.calls.call_grammar import Chat, call_reasoning, check_grammar
from orca.gateway.calls.idempotency import body_digest
from orca.gateway.calls.opened_call import OpenedCall
from orca.gateway.calls.submit import Encode, EncodedPrompts, encode_for_current, submit_to_current
from orca.gateway.calls.target import CallTokens, begin_targets, other_ids
from orca.gateway.calls.token_limits import token_limits
from orca.gateway.errors import ApiError
from orca.gateway.gateway import Gateway
from orca.gateway.http.receive import CallBudget, UnreadBody, receive_body
from orca.gateway.models.models import ServedModel
from orca.gateway.render.render import AnswerKind, RenderModel, RenderOptions
from orca.gateway.responses.bodies import ResponseChat
from orca.gateway.routes.call_summary import summarize_call
from orca.gateway.routes.request_state import describe, describe_new, state_answer
from orca.pool.records import Parent, Submission

log = logging.getLogger(__name__)

COMPLETIONS, CHAT, RESPONSES = PATHS = "/v1/completions", "/v1/chat/completions", "/v1/responses"
"""Paths of the calls that generate."""

GenerationBodyType = TypeVar("GenerationBodyType", CompletionBody, ChatBody)


async def complete(gateway: Gateway, call: OpenedCall, unread: UnreadBody) -> Response:
    """Serve /v1/completions. Raises: ApiError, OrcaError; then nothing was accepted."""
    with gateway.body_budget.for_call() as budget:
        body = await _receive(gateway, call, unread, CompletionBody, budget)
        return await generate(gateway, call, body, partial(_encode_prompts, gateway, body), id_prefix="cmpl-")


async def chat(gateway: Gateway, call: OpenedCall, unread: UnreadBody) -> Response:
    """Serve /v1/chat/completions. Raises: ApiError, OrcaError; then nothing was accepted."""
    with gateway.body_budget.for_call() as budget:
        body = await _receive(gateway, call, unread, ChatBody, budget)
        return await generate(gateway, call, body, partial(encode_chat, gateway, body), id_prefix="chatcmpl-")


async def _receive(
    gateway: Gateway, call: OpenedCall, unread: UnreadBody, body_type: type[GenerationBodyType], budget: CallBudget
) -> GenerationBodyType:
    """Read and check a call's body. Raises: ApiError, also for what `check_call` refuses."""
    body = await receive_body(unread, body_type, gateway.settings, budget)
    await check_call(gateway, call, body)
    return body


async def check_call(gateway: Gateway, call: OpenedCall, body: CompletionBody | ChatBody) -> None:
    """Check the priority, the deadline and the name of the model. Raises: ApiError, OrcaError."""
    await check_priority(gateway, call.key, body.priority, call.keyed_name)
    priority = call.priority(body.priority)
    with _counting_unreachable(gateway):
        await check_deadlines(gateway, body.deadline_ms, call.goals, priority, call.keyed_name)
    gateway.models.check_name(body.model)


@contextlib.contextmanager
def _counting_unreachable(gateway: Gateway) -> Iterator[None]:
    """Count the call if it is refused because its deadline cannot be met."""
    try:
        yield
    except ApiError as error:
        if error.code == "deadline_unreachable":
            gateway.metrics.count_refused_deadline()
        raise


async def _encode_prompts(gateway: Gateway, body: CompletionBody, model: ServedModel) -> CallTokens:
    add_special_tokens = body.add_special_tokens is not False
    prompts = completion_prompts(body, model, gateway.settings)
    if body.model not in (None, model.info.name) and any(isinstance(prompt, list) for prompt in prompts):
        raise other_ids("prompt", body.model, model)
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
    encoded = {
        name: prompt
        if isinstance(prompt, list)
        else await model.encoder.encode_prompt(prompt, param=name, add_special_tokens=add_special_tokens)
        for name, prompt in zip(names, prompts, strict=True)
    }
    tokens = await begin_targets(body, encoded, model)
    limits = await token_limits(body, model, gateway.settings)
    return replace(tokens, grammar=await check_grammar(body, model, gateway.settings), limits=limits)


async def encode_chat(gateway: Gateway, body: ChatBody, model: ServedModel) -> CallTokens:
    tools = chat_tools(body, model)
    text = await chat_prompt(body, model, gateway.settings, tools)
    # Templates write special tokens out.
    add_special_tokens = body.add_special_tokens is True
    prompt = await model.encoder.encode_prompt(text, param="messages", add_special_tokens=add_special_tokens)
    tokens = await begin_targets(body, {"messages": prompt}, model)
    reasoning = call_reasoning(body, model, text, prompt)
    grammar = await check_grammar(body, model, gateway.settings, Chat(prompt, tools, reasoning))
    limits = await token_limits(body, model, gateway.settings)
    return replace(tokens, grammar=grammar, tools=tools, limits=limits, reasoning=reasoning)


async def generate(
    gateway: Gateway, call: OpenedCall, body: CompletionBody | ChatBody, encode: Encode, *, id_prefix: str
) -> Response:
    """Accept the call inside a span of its own, which ends with the connection, or here if the call is refused."""
    encoded = await encode_for_current(gateway, encode, call.keyed_name)
    if encoded is not None:
        prompts = len(encoded.tokens.prompts)
        await take_rest_from_rate(gateway, call.key, call.keyed_name, prompts=prompts, choices=body.n or 1)
    span = gateway.tracing.start(f"POST {call.path}", call.traceparent)
    try:
        with _counting_unreachable(gateway):
            return await _accept(gateway, call, body, encoded, span, id_prefix=id_prefix)
    except BaseException as error:
        gateway.tracing.fail(span, error)
        raise


async def _accept(
    gateway: Gateway,
    call: OpenedCall,
    body: CompletionBody | ChatBody,
    encoded: EncodedPrompts | None,
    span: CallSpan,
    *,
    id_prefix: str,
) -> Response:
    """Submit, and only when the record is durable return the response that will answer."""
    is_background = bool(body.background) or call.prefers_async
    # In the Responses API a background call may stream, too: it goes on when nobody reads it.
    answers_at_once = is_background and not (isinstance(body, ResponseChat) and body.stream)
    context = CallContext(
        call=call,
        parent=call.keyed_name or f"{id_prefix}{secrets.token_hex(16)}",
        reader=secrets.token_hex(8),
        now_ms=gateway.clock_ms(),
        seed=secrets.randbelow(SEEDS),
        # A repeated call is the same one also if the response that it continues is gone by now.
        digest=""
        if call.keyed_name is None
        else body_digest(call.path, body.call if isinstance(body, ResponseChat) else body),
        is_kept=is_background or call.keyed_name is not None,
        traceparent=span.traceparent,
        schema=gateway.models.schema,
    )
    wanted, requests = await submit_to_current(gateway, body, encoded, context)
    _record_accepted(gateway, call.key, wanted, requests)
    stored = await _stored(gateway, wanted, requests)
    model = gateway.models.require(stored.requests[0].revision)
    if answers_at_once:
        answer = await _answer_in_background(gateway, call, wanted, stored, model.render_model)
        gateway.tracing.finish(span, CallTiming(call.started), {"orca.request_id": context.parent})
        return answer
    gateway.readers.add(context.parent, context.reader)
    # With an Idempotency-Key the requests may be those of an earlier call.
    subscription = gateway.watcher.subscribe((request.id for request in requests), are_new=not wanted.digest)
    accepted = AcceptedCall(
        requests=requests,
        options=replace(RenderOptions.from_json(stored.render), event_ids=call.wants_event_ids),
        subscription=subscription,
        timing=CallTiming(call.started),
        # The pool keeps an ended call longer than the lease of its one reader. With an Idempotency-Key more readers may
        # come.
        remove_reader=lambda has_ended: gateway.readers.remove(
            context.parent, context.reader, lapses=has_ended and not wanted.digest
        ),
        on_closed=lambda done, ends: summarize_call(gateway, done, ends, span),
    )
    if body.stream:
        return stream(gateway, accepted, model)
    return WholeDelivery(accepted, model.render_model, gateway.metrics, gateway.drain)


def stream(gateway: Gateway, accepted: AcceptedCall, model: ServedModel) -> StreamDelivery:
    """Return the response that answers by events."""
    keep_alive_s = gateway.settings.keep_alive_seconds
    return StreamDelivery(accepted, model.render_model, gateway.metrics, gateway.drain, keep_alive_s=keep_alive_s)


async def _stored(gateway: Gateway, wanted: Submission, requests: Sequence[Request]) -> Parent:
    """Return the stored call: with an Idempotency-Key it may be an earlier one. Raises: PoolUnavailable."""
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
    gateway: Gateway, call: OpenedCall, wanted: Submission, stored: Parent, render_model: RenderModel
) -> Response:
    """Answer 202 with the call's state. Raises: PoolUnavailable, only for a call with an Idempotency-Key."""
    options = RenderOptions.from_json(stored.render)
    if options.kind is AnswerKind.RESPONSE:
        # A client of the Responses API retrieves it.
        (request,) = stored.requests
        body = await render_response(request, options, (), None, render_model, status="queued")
        return Response(body, headers={"x-request-id": stored.parent}, media_type="application/json")
    if wanted.digest:
        document = await describe(gateway, render_model, stored)
    else:
        document = await describe_new(render_model, stored)
    applied = {"preference-applied": "respond-async"} if call.prefers_async else {}
    return state_answer(document, 202, applied)


def _record_accepted(gateway: Gateway, key: ApiKey | None, wanted: Submission, requests: Sequence[Request]) -> None:
    # Only targets have a prefix.
    prefix_tokens = RenderOptions.from_json(wanted.render).prefix_tokens if requests[0].decoder_prefix else 0
    for request in requests:
        gateway.metrics.prompt_tokens.observe(len(request.prompt) + prefix_tokens)
        gateway.metrics.prompt_tokens_total.inc(len(request.prompt) + prefix_tokens)
        if request.decoder_prefix:
            gateway.metrics.source_tokens_total.inc(len(request.prompt))
            gateway.metrics.target_tokens_total.inc(len(request.decoder_prefix))
    fields = {"request_id": requests[0].parent, "requests": len(requests), "key": None if key is None else key.name}
    log.info("call accepted", extra=fields)
