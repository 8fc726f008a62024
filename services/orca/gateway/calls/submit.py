"""Submits a call to the pool, for the model that is in force there.

The pool refuses a model that was replaced a moment ago. Then the call is encoded again, for its successor.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from orca.core.domain.errors import NeverFits, NotInForce, Overloaded, PoolUnavailable, QueueFull
from orca.core.domain.request import Request
from orca.gateway.calls.accept import CallContext, echo_texts, submission
from orca.gateway.calls.bodies import ChatBody, CompletionBody
from orca.gateway.calls.target import CallTokens
from orca.gateway.gateway import Gateway
from orca.gateway.models.models import ServedModel, not_served
from orca.pool.api import RequestPool
from orca.pool.records import Submission

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


async def submit_to_current(
    gateway: Gateway, body: CompletionBody | ChatBody, encoded: EncodedPrompts, context: CallContext
) -> tuple[Submission, Sequence[Request]]:
    """Submit for the model in force. If another one is in force by now, encode the call for that one.

    Returns: what was submitted, and the requests that the pool has for it.
    Raises: ApiError 503 when this gateway does not know the model in force; OrcaError.
    """
    echoed = await echo_texts(body, encoded.tokens.prompts, encoded.model, gateway.settings)
    for tries_left in reversed(range(MODELS_TRIED_MAX)):
        promised = gateway.models.promised(encoded.model)
        wanted = submission(body, encoded.tokens, encoded.model, gateway.settings, context, promised, echoed)
        try:
            return wanted, await _submit(gateway, wanted)
        except NotInForce as error:
            # Not the client's mistake.
            if not tries_left or error.in_force is None or not gateway.models.set_current(error.in_force):
                raise not_served(str(error)) from error
            encoded = await EncodedPrompts.for_model(encoded.encode, gateway.models.current)
            echoed = await echo_texts(body, encoded.tokens.prompts, encoded.model, gateway.settings)
        except NeverFits as error:
            # A client that named no length gets what fits by now.
            if not tries_left or not gateway.models.update_promise(encoded.model, error.promised):
                raise
    raise AssertionError("the last try returns or raises")


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
