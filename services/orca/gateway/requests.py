"""Requests by their id, on any gateway: whoever made a call elsewhere reads on here.

The pool has all that an answer is made of, so nothing is asked of the gateway that took the call.
"""

import asyncio
import logging
import secrets
import time
from dataclasses import replace

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from orca.gateway.cursor import ALL_READ, check_written, parse_cursor
from orca.gateway.delivery import Accepted, StreamDelivery, Timing
from orca.gateway.errors import UNAVAILABLE, ApiError
from orca.gateway.generation import Gateway
from orca.gateway.render import Rendering
from orca.pool.api import Parent

log = logging.getLogger(__name__)


async def events(gateway: Gateway, http: HttpRequest, request_id: str) -> Response:
    """GET /v1/requests/{id}/events: the stream from behind the events that the client has, with event ids.

    Raises: ApiError, OrcaError.
    """
    gateway.drain.check()
    started = time.perf_counter()
    parent = await gateway.pool.parent(request_id)
    _check_revision(gateway, parent)
    text = http.headers.get("last-event-id") or http.query_params.get("starting_after") or ""
    if text.strip() == ALL_READ:
        # Tells an EventSource, which would connect again for ever, that there is no more.
        return Response(status_code=204)
    cursor = parse_cursor(text, len(parent.requests))
    if cursor:
        check_written(cursor, await asyncio.gather(*(gateway.pool.status(one.id) for one in parent.requests)))
    reader = secrets.token_hex(8)
    await gateway.pool.attach(request_id, reader)
    gateway.readers.add(request_id, reader)
    accepted = Accepted(
        requests=parent.requests,
        rendering=replace(Rendering.from_json(parent.render), event_ids=True),
        follower=gateway.watcher.follow(request.id for request in parent.requests),
        timing=Timing(started),
        leave=lambda: gateway.readers.remove(request_id, reader),
        cursor=cursor,
        is_resumed=True,
    )
    log.info("stream resumed", extra={"request_id": request_id, "cursor": ",".join(cursor.values())})
    return StreamDelivery(accepted, gateway.reading, gateway.metrics, gateway.drain)


def _check_revision(gateway: Gateway, parent: Parent) -> None:
    """Another model's tokenizer would write other bytes. Raises: ApiError 503: a gateway of that revision can."""
    revision = parent.requests[0].revision
    if revision != gateway.served.info.revision:
        message = f"the request is of revision {revision}, which this gateway does not serve"
        raise ApiError(503, message, kind=UNAVAILABLE, code="revision_not_served", retry_after_s=1)
