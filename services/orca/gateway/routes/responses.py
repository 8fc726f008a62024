"""The Responses API: create a response, retrieve it, go on with its stream, list its input, cancel it, delete it.

A response is the answer of a chat in another form (gateway/responses). Its record lies in the pool like any other, so
every gateway can retrieve it, for as long as the pool keeps it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from orca.core.domain.errors import InvalidRequest, UnknownRequest
from orca.gateway.answer.offload import read_output, render_response
from orca.gateway.calls.opened_call import OpenedCall
from orca.gateway.errors import ApiError
from orca.gateway.gateway import Gateway
from orca.gateway.http.receive import CallBudget, UnreadBody, check_shape, receive_body
from orca.gateway.models.models import ServedModel
from orca.gateway.render.render import AnswerKind, RenderOptions
from orca.gateway.responses.bodies import ResponseBody, is_stored, translate
from orca.gateway.responses.conversation import Item, page_of, whole_items
from orca.gateway.routes import generation
from orca.gateway.routes.request_state import read_logs
from orca.gateway.routes.requests import own_parent, resume, statuses_of
from orca.gateway.settings import GatewaySettings
from orca.pool.records import OwnershipState, Parent

log = logging.getLogger(__name__)

T = TypeVar("T")

STREAM, STARTING_AFTER, PREVIOUS = "stream", "starting_after", "previous_response_id"


async def create(gateway: Gateway, call: OpenedCall, unread: UnreadBody) -> Response:
    """Serve POST /v1/responses. Raises: ApiError, OrcaError; then nothing was accepted."""
    with gateway.body_budget.for_call() as budget:
        body = await receive_body(unread, ResponseBody, gateway.settings, budget)
        earlier, refusal = await _earlier_items(gateway, call, body.previous_response_id, budget)
        translation = await _off_loop(gateway, budget.total_bytes, partial(translate, body, earlier))
        chat = translation.chat
        if body.previous_response_id is not None and chat.items_json is not None:
            _checked_size(chat.items_json, gateway.settings)
        await generation.check_call(gateway, call, chat)
        encode = partial(generation.encode_chat, gateway, chat) if refusal is None else partial(_refuse, refusal)
        try:
            return await generation.generate(gateway, call, chat, encode, id_prefix="resp_")
        except (ApiError, InvalidRequest) as error:
            raise translation.error(error) from error


async def retrieve(gateway: Gateway, call: OpenedCall, http: HttpRequest, response_id: str) -> Response:
    """Serve GET /v1/responses/{id}, as a stream if the query says so. Raises: ApiError, OrcaError."""
    parent = await _own_response(gateway, call, response_id)
    streams = http.query_params.get(STREAM, "false").lower()
    if streams not in ("true", "false"):
        raise ApiError(400, f"{STREAM}: must be true or false", param=STREAM, code="invalid_value")
    if streams == "false":
        if STARTING_AFTER in http.query_params:
            raise ApiError(400, f"{STARTING_AFTER}: needs stream=true", param=STARTING_AFTER, code="invalid_cursor")
        return await _answer(gateway, parent)
    text = http.query_params.get(STARTING_AFTER, "-1")
    if not (text == "-1" or (text.isascii() and text.isdigit() and len(text) < 10)):
        message = f"{STARTING_AFTER}: must be the number of an event, not {text[:32]!r}"
        raise ApiError(400, message, param=STARTING_AFTER, code="invalid_cursor")
    gateway.drain.check()
    cursor = {} if text == "-1" else {0: text}
    with _known(response_id):
        return await resume(gateway, call, parent, cursor, await statuses_of(gateway, parent))


async def cancel(gateway: Gateway, call: OpenedCall, response_id: str) -> Response:
    """Serve POST /v1/responses/{id}/cancel: end a response that has not ended. Raises: ApiError, OrcaError."""
    parent = await _own_response(gateway, call, response_id)
    await gateway.pool.cancel(response_id)
    return await _answer(gateway, parent)


async def input_items(gateway: Gateway, call: OpenedCall, http: HttpRequest, response_id: str) -> Response:
    """Serve GET /v1/responses/{id}/input_items: a page of the items that a response was made from.

    Raises: ApiError, OrcaError.
    """
    await _own_response(gateway, call, response_id)
    with _known(response_id), gateway.body_budget.for_call() as budget:
        text = await gateway.pool.conversation(response_id) or "[]"
        size = len(text.encode())
        budget.take(size)
        body = await _off_loop(gateway, size, partial(_page, text, dict(http.query_params)))
    return Response(body, headers={"x-request-id": response_id}, media_type="application/json")


def _page(text: str, query: Mapping[str, str]) -> bytes:
    return orjson.dumps(page_of(orjson.loads(text), query))


async def delete(gateway: Gateway, call: OpenedCall, response_id: str) -> Response:
    """Serve DELETE /v1/responses/{id}: end a response and forget all of it. Raises: ApiError, OrcaError."""
    await _own_response(gateway, call, response_id)
    with _known(response_id):
        await gateway.pool.forget(response_id)
    log.info("response deleted by its client", extra={"request_id": response_id})
    body = orjson.dumps({"id": response_id, "object": "response", "deleted": True})
    return Response(body, headers={"x-request-id": response_id}, media_type="application/json")


async def _earlier_items(
    gateway: Gateway, call: OpenedCall, response_id: str | None, budget: CallBudget
) -> tuple[Sequence[Item], ApiError | None]:
    """Return the conversation that a call continues, and the error if there is none.

    The error is not raised where the call may repeat one that the pool has: that one needs no conversation.
    Raises: ApiError, OrcaError.
    """
    if response_id is None:
        return (), None
    try:
        parent = await own_parent(gateway, call, response_id)
        text = await gateway.pool.conversation(response_id)
        if text is None:
            raise UnknownRequest(response_id)
        log = (await read_logs(gateway.pool, parent.requests)).get(parent.requests[0].id)
    except UnknownRequest:
        message = f"Previous response with id '{response_id}' not found."
        error = ApiError(404, message, param=PREVIOUS, code="previous_response_not_found")
        if call.keyed_name is None:
            raise error from None
        return (), error
    if log is None or log.end is None:
        message = f"{PREVIOUS}: the response '{response_id}' has not ended; wait for it, or cancel it"
        raise ApiError(400, message, param=PREVIOUS, code="invalid_value")
    (request,) = parent.requests
    size = _checked_size(text, gateway.settings)
    budget.take(size)
    render_model = gateway.models.require(request.revision).render_model
    output = await read_output(request, RenderOptions.from_json(parent.render), log.tokens, log.end, render_model)
    return await _off_loop(gateway, size, partial(_continued, text, output, gateway.settings)), None


async def _refuse(error: ApiError, _model: ServedModel) -> NoReturn:
    """Stand for the encoding of a call that cannot be encoded. Raises: ApiError."""
    raise error


def _checked_size(conversation: str, settings: GatewaySettings) -> int:
    """Return the bytes of a conversation. Raises: ApiError if it is larger than a body may be."""
    size, most = len(conversation.encode()), settings.body_bytes_max
    if size > most:
        message = f"{PREVIOUS}: the conversation has {size} bytes, more than {most}; begin a new one"
        raise ApiError(400, message, param=PREVIOUS, code="invalid_value")
    return size


async def _off_loop(gateway: Gateway, size: int, work: Callable[[], T]) -> T:
    """Do some work on JSON of this size in bytes: in a thread if it is long, so that streams go on meanwhile."""
    return await asyncio.to_thread(work) if size > gateway.settings.inline_body_bytes_max else work()


def _continued(input_items: str, output: Sequence[Item], settings: GatewaySettings) -> Sequence[Item]:
    """Return the items of a conversation with its last answer. Raises: ApiError."""
    items = [*orjson.loads(input_items), *whole_items(output)]
    check_shape(items, settings, f"{PREVIOUS}: the conversation", PREVIOUS)
    return items


async def _answer(gateway: Gateway, parent: Parent) -> Response:
    (request,) = parent.requests
    model = gateway.models.require(request.revision)
    with _known(parent.parent):
        logs, status = await asyncio.gather(read_logs(gateway.pool, parent.requests), gateway.pool.status(request.id))
    log = logs.get(request.id)
    body = await render_response(
        request,
        RenderOptions.from_json(parent.render),
        () if log is None else log.tokens,
        None if log is None else log.end,
        model.render_model,
        status="queued" if status.state is OwnershipState.QUEUED else "in_progress",
    )
    return Response(body, headers={"x-request-id": parent.parent}, media_type="application/json")


async def _own_response(gateway: Gateway, call: OpenedCall, response_id: str) -> Parent:
    """Return the caller's own response. Raises: ApiError 404 as OpenAI has it."""
    with _known(response_id):
        parent = await own_parent(gateway, call, response_id)
    options = RenderOptions.from_json(parent.render)
    if options.kind is not AnswerKind.RESPONSE or not is_stored(options.items):
        raise _unknown(response_id)
    return parent


@contextlib.contextmanager
def _known(response_id: str) -> Iterator[None]:
    """Map the error for a record that is not there, or not there any more, to that of an unknown response."""
    try:
        yield
    except UnknownRequest:
        raise _unknown(response_id) from None


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id}' not found.", param="id", code="not_found")
