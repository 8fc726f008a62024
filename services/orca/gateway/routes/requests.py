"""Calls by their id, on any gateway: a client that made a call at another gateway can resume it here.

The pool has everything that an answer is made of, so the gateway that took the call is not needed.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace

from starlette.responses import Response

from orca.core.domain.errors import UnknownRequest
from orca.gateway.answer.delivery import AcceptedCall, CallTiming
from orca.gateway.answer.offload import write_answer
from orca.gateway.calls.opened_call import OpenedCall
from orca.gateway.errors import ApiError, end_error
from orca.gateway.gateway import Gateway
from orca.gateway.render.cursor import Cursor, check_written, parse_cursor
from orca.gateway.render.render import AnswerKind, RenderOptions
from orca.gateway.responses.bodies import is_stored
from orca.gateway.routes.call_summary import summarize_call
from orca.gateway.routes.generation import stream
from orca.gateway.routes.request_state import describe, read_logs, state_answer
from orca.pool.records import Parent, RequestStatus

log = logging.getLogger(__name__)


async def events(gateway: Gateway, call: OpenedCall, request_id: str) -> Response:
    """Serve GET /v1/requests/{id}/events: the stream after the events that the client has, with event ids.

    Raises: ApiError, OrcaError.
    """
    gateway.drain.check()
    parent = await own_parent(gateway, call, request_id)
    gateway.models.require(parent.requests[0].revision)
    if call.position.is_at_end:
        # Tells an EventSource, which would otherwise connect again for ever, that there is no more.
        return Response(status_code=204)
    if RenderOptions.from_json(parent.render).kind is AnswerKind.RESPONSE:
        raise ApiError(404, f"{request_id} is a response: GET /v1/responses/{request_id}?stream=true", code="not_found")
    cursor = parse_cursor(call.position.text, len(parent.requests), source=call.position.source)
    statuses = await statuses_of(gateway, parent)
    check_written(cursor, statuses, source=call.position.source)
    return await resume(gateway, call, parent, cursor, statuses)


async def statuses_of(gateway: Gateway, parent: Parent) -> Sequence[RequestStatus]:
    """Return the statuses of a call's requests, in order. Raises: OrcaError."""
    return await asyncio.gather(*(gateway.pool.status(request.id) for request in parent.requests))


async def resume(
    gateway: Gateway, call: OpenedCall, parent: Parent, cursor: Cursor, statuses: Sequence[RequestStatus]
) -> Response:
    """Return the stream of a call after the events that its client has. Raises: ApiError, OrcaError."""
    request_id = parent.parent
    model = gateway.models.require(parent.requests[0].revision)
    options = replace(RenderOptions.from_json(parent.render), event_ids=True)
    reader = secrets.token_hex(8)
    await gateway.pool.attach(request_id, reader)
    # From here on nothing may fail: the entry is renewed until `remove_reader`.
    gateway.readers.add(request_id, reader)
    accepted = AcceptedCall(
        requests=parent.requests,
        options=options,
        subscription=gateway.watcher.subscribe(request.id for request in parent.requests),
        timing=CallTiming(call.started),
        remove_reader=lambda _has_ended: gateway.readers.remove(request_id, reader),
        cursor=cursor,
        is_resumed=True,
        ended_before=frozenset(status.request.id for status in statuses if status.end is not None),
        on_closed=lambda done, ends: summarize_call(gateway, done, ends),
    )
    log.info("stream resumed", extra={"request_id": request_id, "cursor": ",".join(cursor.values())})
    return stream(gateway, accepted, model)


async def state(gateway: Gateway, call: OpenedCall, request_id: str) -> Response:
    """Serve GET /v1/requests/{id}: its state and its text so far. Raises: OrcaError."""
    parent = await _shown_parent(gateway, call, request_id)
    render_model = gateway.models.require(parent.requests[0].revision).render_model
    return state_answer(await describe(gateway, render_model, parent), 200)


async def cancel(gateway: Gateway, call: OpenedCall, request_id: str) -> Response:
    """Serve DELETE /v1/requests/{id}: end what has not ended, and answer with the state. Raises: OrcaError.

    If only other gateways have the model, the call is cancelled all the same, and the state has no text.
    """
    parent = await own_parent(gateway, call, request_id)
    await gateway.pool.cancel(request_id)
    log.info("request cancelled by its client", extra={"request_id": request_id})
    model = gateway.models.find(parent.requests[0].revision)
    render_model = None if model is None else model.render_model
    return state_answer(await describe(gateway, render_model, parent), 200)


async def result(gateway: Gateway, call: OpenedCall, request_id: str) -> Response:
    """Serve GET /v1/requests/{id}/result: the answer of a call that does not stream; until its end 202 and the state.

    Raises: ApiError if a choice failed, OrcaError.
    """
    parent = await _shown_parent(gateway, call, request_id)
    render_model = gateway.models.require(parent.requests[0].revision).render_model
    logs = await read_logs(gateway.pool, parent.requests)
    ended = [(log.tokens, log.end) for request in parent.requests if (log := logs.get(request.id)) and log.end]
    if len(ended) < len(parent.requests):
        document = await describe(gateway, render_model, parent)
        return state_answer(document, 202, {"retry-after": "1"})
    options = RenderOptions.from_json(parent.render)
    for request, (_, end) in zip(parent.requests, ended, strict=True):
        if (failure := end_error(end, request, options.goals)) is not None:
            raise failure
    body = await write_answer(parent.requests, options, ended, render_model)
    return Response(body, headers={"x-request-id": request_id}, media_type="application/json")


async def own_parent(gateway: Gateway, call: OpenedCall, request_id: str) -> Parent:
    """Return the caller's own call. Raises: UnknownRequest, also for another owner's call, which must stay hidden."""
    parent = await gateway.pool.parent(request_id)
    if parent.owner != call.owner:
        raise UnknownRequest(request_id)
    return parent


async def _shown_parent(gateway: Gateway, call: OpenedCall, request_id: str) -> Parent:
    """Return the caller's own call. Raises: UnknownRequest, also for a response that its client did not let store."""
    parent = await own_parent(gateway, call, request_id)
    options = RenderOptions.from_json(parent.render)
    if options.kind is AnswerKind.RESPONSE and not is_stored(options.items):
        raise UnknownRequest(request_id)
    return parent
