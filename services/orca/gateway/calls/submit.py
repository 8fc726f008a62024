"""Submits a call to the pool, for the model that is in force there.

The pool refuses a model that was replaced a moment ago. Then the call is encoded again, for its successor. The same
holds for a refusal by such a model: it counts only if the model is still in force. Another model may have another
vocabulary, other lengths and other fields.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from orca.core.domain.errors import (
    InvalidRequest,
    JustForgotten,
    NeverFits,
    NotInForce,
    NotStoredYet,
    Overloaded,
    PoolUnavailable,
    QueueFull,
    UnknownRequest,
)
from orca.core.domain.request import Request
from orca.gateway.calls.accept import CallContext, echo_texts, submission
from orca.gateway.calls.admission import check_requests, is_stored
from orca.gateway.calls.bodies import ChatBody, CompletionBody
from orca.gateway.calls.target import PREFIX, CallTokens, needs_newer_schema, salts_not_stored_yet
from orca.gateway.errors import ApiError, split_error
from orca.gateway.gateway import Gateway
from orca.gateway.models.models import ServedModel, not_served
from orca.pool.api import RequestPool
from orca.pool.records import Submission
from orca.pool.schemas import SCHEMA_OF_TARGETS

log = logging.getLogger(__name__)

TAKE_BACK_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between attempts. A submit whose answer was lost may reach a slow pool a little after it was given up."""

MODELS_TRIED_MAX = 3
"""Models tried for one call: a second one if the model was just replaced, a third if that was undone at once."""

Encode = Callable[[ServedModel], Awaitable[CallTokens]]
"""Encodes a call as token ids of a model. Raises: ApiError, InvalidRequest."""


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """A call as token ids of the model that is in force as far as this gateway knows."""

    model: ServedModel
    tokens: CallTokens
    encode: Encode  # for another model, if that is in force by the time of the submit

    @classmethod
    async def for_model(cls, encode: Encode, model: ServedModel) -> "EncodedPrompts":
        return cls(model, await encode(model), encode)


async def encode_for_current(gateway: Gateway, encode: Encode, name: str | None) -> EncodedPrompts | None:
    """Encode a call for the model in force.

    Args: name: the id that the call's Idempotency-Key stands for; None without such a key.
    Returns: None if that model refuses the call, and the pool has a call of this name: this one may repeat it.
    Raises: ApiError, InvalidRequest.
    """
    for tries_left in reversed(range(MODELS_TRIED_MAX)):
        model = gateway.models.current
        try:
            return await EncodedPrompts.for_model(encode, model)
        except (ApiError, InvalidRequest):
            if tries_left and await _was_replaced(gateway, model):
                continue
            if name is not None and await is_stored(gateway.pool, name):
                return None
            raise
    raise AssertionError("the last try returns or raises")


async def submit_to_current(
    gateway: Gateway, body: CompletionBody | ChatBody, encoded: EncodedPrompts | None, context: CallContext
) -> tuple[Submission, Sequence[Request]]:
    """Submit for the model in force. If another one is in force by now, encode the call for that one.

    Args: encoded: result of `encode_for_current`.
    Returns: what was submitted, and the requests that the pool has for it.
    Raises: ApiError 503 when this gateway does not know the model in force; OrcaError.
    """
    if encoded is None:
        return await _submit_again(gateway, context)
    try:
        return await _submit_encoded(gateway, body, encoded, context)
    except (ApiError, InvalidRequest):
        # The refusal is that of another model than the one that the call was accepted for.
        if not context.digest or not await is_stored(gateway.pool, context.parent):
            raise
    return await _submit_again(gateway, context)


async def _submit_encoded(
    gateway: Gateway, body: CompletionBody | ChatBody, encoded: EncodedPrompts, context: CallContext
) -> tuple[Submission, Sequence[Request]]:
    tries_left = MODELS_TRIED_MAX
    while tries_left:
        tries_left -= 1
        model = encoded.model
        try:
            echoed = await echo_texts(body, encoded.tokens.prompts, model, gateway.settings)
            promised = gateway.models.promised(model)
            wanted = submission(body, encoded.tokens, model, gateway.settings, context, promised, echoed)
            check_requests(gateway, wanted.requests, body.deadline_ms)
            return wanted, await _submit(gateway, wanted)
        except NotInForce as error:
            # Not the client's mistake.
            if not tries_left or error.in_force is None or not gateway.models.set_current(error.in_force):
                raise await _not_in_force(gateway, model, error) from error
        except NeverFits as error:
            # A client that named no length gets what fits by now.
            if not tries_left or not gateway.models.update_promise(model, error.promised):
                if model.info.encoder_decoder is None:
                    raise
                raise _split_error(gateway, model, wanted, error) from error
            continue
        except NotStoredYet as error:
            if error.in_force < context.schema:
                # An older number is in force again, and what the client left open may need no newer one. This is no
                # try of a model: the number falls each time, and a wish refuses no call.
                context = replace(context, schema=error.in_force)
                tries_left += 1
                continue
            if "cache_salt" in error.names and body.cache_salt is None:
                raise salts_not_stored_yet(error) from error
            raise needs_newer_schema(error, model, encoded.tokens) from error
        except (ApiError, InvalidRequest):
            if not tries_left or not await _was_replaced(gateway, model):
                raise
        encoded = await EncodedPrompts.for_model(encoded.encode, gateway.models.current)
    raise AssertionError("the last try returns or raises")


async def _not_in_force(gateway: Gateway, model: ServedModel, error: NotInForce) -> ApiError | NotStoredYet:
    """Return the error for a model that is not in force. It names what keeps an encoder-decoder model from it."""
    if model.info.encoder_decoder is not None:
        with contextlib.suppress(PoolUnavailable):
            stats = await gateway.pool.stats()
            if stats.schema < SCHEMA_OF_TARGETS:
                return needs_newer_schema(NotStoredYet((PREFIX,), stats.schema), model, CallTokens(()))
    return not_served(str(error))


def _split_error(gateway: Gateway, model: ServedModel, wanted: Submission, error: NeverFits) -> ApiError:
    promised = gateway.models.promised(model)
    assert promised is not None, "the refusal told the promise"
    largest = max(wanted.requests, key=lambda request: request.slots(promised.block_tokens))
    return split_error(largest, error, promised.block_tokens)


async def _was_replaced(gateway: Gateway, model: ServedModel) -> bool:
    """Poll the pool whether another model than this one is in force, and make that one the current one.

    A gateway with one model cannot encode for another one, and saves the poll.
    Raises: ApiError 503 if this gateway does not know the model in force.
    """
    if not gateway.models.has_others:
        return False
    try:
        stats = await gateway.pool.stats()
    except PoolUnavailable:
        return False
    gateway.models.update(stats)
    if stats.revision is not None and gateway.models.find(stats.revision) is None:
        raise not_served(f"the model in force is revision {stats.revision}, which this gateway does not serve")
    return gateway.models.current is not model


async def _submit_again(gateway: Gateway, context: CallContext) -> tuple[Submission, Sequence[Request]]:
    """Submit what the pool has under the call's name, so that the call reads the answer that it had before.

    Raises: NameTaken if the stored call has another body; JustForgotten if it was deleted in the meantime; ApiError 503
        if its retention ended in the meantime.
    """
    try:
        stored = await gateway.pool.parent(context.parent)
        wanted = Submission(
            parent=stored.parent,
            requests=stored.requests,
            reader=context.reader,
            on_disconnect=stored.on_disconnect,
            render=stored.render,
            owner=stored.owner,
            digest=context.digest,
        )
        return wanted, await _submit(gateway, wanted)
    except JustForgotten:
        raise
    except (NotInForce, UnknownRequest) as error:
        raise not_served("the call's first answer was forgotten a moment ago; make the call again") from error


async def _submit(gateway: Gateway, wanted: Submission) -> Sequence[Request]:
    """Submit, and if the answer is lost submit once more under the same name: the first one may have happened."""
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
            gateway.overload.backlog.note_full()
        raise gateway.overload.with_retry_after(error, wanted.parent) from None


async def _take_back(pool: RequestPool, parent: str) -> None:
    """Cancel what may have been stored for a call that was refused: its client never learns the name."""
    for wait_s in TAKE_BACK_SECONDS:
        await asyncio.sleep(wait_s)
        with contextlib.suppress(PoolUnavailable):
            await pool.cancel(parent)
            return
    log.warning("a refused call may run, for the pool did not answer", extra={"request_id": parent})
