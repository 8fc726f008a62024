"""A request as its owner is shown it: where it stands, its text so far, and where its answer is to be had."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.responses import Response

from orca.core.domain.errors import UnknownRequest
from orca.core.domain.request import Request
from orca.gateway.answer.offload import write_text
from orca.gateway.latency_goals import Goals, judge, latency_of
from orca.gateway.render.render import Reading, Rendering
from orca.pool.api import RequestPool
from orca.pool.records import LogSlice, OwnershipState, Parent, RequestStatus

_WORDS = {OwnershipState.QUEUED: "queued", OwnershipState.OWNED: "running", OwnershipState.ENDED: "ended"}
_NOTHING = LogSlice(0, (), None)


async def read_logs(pool: RequestPool, requests: Sequence[Request]) -> dict[str, LogSlice]:
    """The logs as they are now, page by page; those without an entry are left out. Raises: UnknownRequest."""
    logs: dict[str, LogSlice] = {}
    starts = {request.id: 0 for request in requests}
    while starts:
        pages = await pool.read_many(starts)
        starts = {}
        for request_id, page in pages.items():
            if page is None:
                raise UnknownRequest(request_id)
            before = logs[request_id].tokens if request_id in logs else ()
            log = logs[request_id] = replace(page, start=0, tokens=before + page.tokens)
            if log.is_cut:
                starts[request_id] = len(log.tokens)
    return logs


async def describe(pool: RequestPool, reading: Reading | None, parent: Parent) -> dict[str, Any]:
    """The document of a parent.

    Args: reading: None for a parent of a revision whose tokenizer is not here: its texts are null.
    Raises: UnknownRequest, PoolUnavailable.
    """
    # The logs are read last and decide: an end may have come in between.
    statuses = await asyncio.gather(*(pool.status(one.id) for one in parent.requests))
    return await _document(parent, statuses, await read_logs(pool, parent.requests), reading)


async def describe_new(reading: Reading, parent: Parent) -> dict[str, Any]:
    """The document of a parent that was stored just now."""
    return await _document(parent, [RequestStatus.queued(request) for request in parent.requests], {}, reading)


async def _document(
    parent: Parent, statuses: Sequence[RequestStatus], logs: Mapping[str, LogSlice], reading: Reading | None
) -> dict[str, Any]:
    rendering = Rendering.from_json(parent.render)
    goals, choices = rendering.goals, []
    for status in statuses:
        log = logs.get(status.request.id, _NOTHING)
        text = None if reading is None else await write_text(status.request, rendering, log.tokens, log.end, reading)
        choices.append(_choice(status, log, text, goals))
    found = {choice["status"] for choice in choices}
    path = f"/v1/requests/{parent.parent}"
    return {
        "id": parent.parent,
        "object": "request",
        "model": rendering.model,
        "status": found.pop() if len(found) == 1 else "running",
        "created": rendering.created,
        "deadline_unix_ms": parent.requests[0].deadline_wall_ms,
        "slo": {"ttft_ms": goals.ttft_ms, "tpot_ms": goals.tpot_ms, "enforced": goals.is_enforced},
        "on_disconnect": parent.on_disconnect,
        "choices": choices,
        "urls": {"state": path, "events": f"{path}/events", "result": f"{path}/result"},
    }


def _choice(status: RequestStatus, log: LogSlice, text: str | None, goals: Goals) -> dict[str, Any]:
    latency, outcomes = latency_of(status), judge(goals, status)
    return {
        "index": status.request.choice,
        "status": _WORDS[OwnershipState.ENDED if log.end else status.state],
        "tokens": len(log.tokens),
        "text": text,
        "finish_reason": log.end and log.end.reason,
        "stop_reason": log.end and log.end.stop,
        "ttft_ms": latency.ttft_ms,
        "tpot_ms": latency.tpot_ms,
        "slo": {goal.value: outcomes.get(goal) for goal in goals.named},
    }


def state_answer(document: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
    """The document as an answer; `Location` says where it is to be had again."""
    fixed = {"x-request-id": document["id"], "location": document["urls"]["state"]}
    return Response(orjson.dumps(document), status, headers={**fixed, **(headers or {})}, media_type="application/json")
