"""The document about a call for its owner: its state, its text so far, and the URLs of its answer."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.responses import Response

from orca.core.domain.errors import UnknownRequest
from orca.core.domain.request import Request
from orca.core.priority import DEFAULT_PRIORITY, priority_of
from orca.gateway.answer.offload import write_text
from orca.gateway.errors import end_error
from orca.gateway.gateway import Gateway
from orca.gateway.latency_goals import LatencyGoals, judge, latency_of
from orca.gateway.limits.backlog import POLL_SECONDS
from orca.gateway.render.render import RenderModel, RenderOptions
from orca.gateway.routes.waiting_turn import WaitingTurn, waiting_turn
from orca.pool.api import RequestPool
from orca.pool.order.deadline_outcome import deadline_outcome
from orca.pool.records import LogSlice, OwnershipState, Parent, RequestStatus

_STATUS = {OwnershipState.QUEUED: "queued", OwnershipState.OWNED: "running", OwnershipState.ENDED: "ended"}
_EMPTY_LOG = LogSlice(0, (), None)


async def read_logs(pool: RequestPool, requests: Sequence[Request]) -> dict[str, LogSlice]:
    """Read the present logs, page by page; empty ones are left out. Raises: UnknownRequest."""
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


async def describe(gateway: Gateway, render_model: RenderModel | None, parent: Parent) -> dict[str, Any]:
    """Describe a parent.

    Args: render_model: None if this gateway does not have the parent's model; then the texts are null.
    Raises: UnknownRequest, PoolUnavailable.
    """
    # The logs are read last and decide: a request may end in between.
    statuses = await asyncio.gather(*(gateway.pool.status(request.id) for request in parent.requests))
    is_waiting = any(status.older_waiting is not None for status in statuses)
    stats = await gateway.overload.backlog.counts(POLL_SECONDS) if is_waiting else None
    turns = {status.request.id: waiting_turn(status, stats) for status in statuses}
    return await _document(parent, statuses, await read_logs(gateway.pool, parent.requests), render_model, turns)


async def describe_new(render_model: RenderModel, parent: Parent) -> dict[str, Any]:
    """Describe a parent that was stored just now."""
    statuses = [RequestStatus.queued(request) for request in parent.requests]
    return await _document(parent, statuses, {}, render_model, {})


async def _document(
    parent: Parent,
    statuses: Sequence[RequestStatus],
    logs: Mapping[str, LogSlice],
    render_model: RenderModel | None,
    turns: Mapping[str, WaitingTurn | None],
) -> dict[str, Any]:
    options = RenderOptions.from_json(parent.render)
    goals, choices = options.goals, []
    for status in statuses:
        log = logs.get(status.request.id, _EMPTY_LOG)
        text = (
            None
            if render_model is None
            else await write_text(status.request, options, log.tokens, log.end, render_model)
        )
        choices.append(_choice(status, log, text, goals, turns.get(status.request.id)))
    found = {choice["status"] for choice in choices}
    path, priority = f"/v1/requests/{parent.parent}", priority_of(parent.requests[0].weight)
    return {
        "id": parent.parent,
        "object": "request",
        "model": options.model,
        "status": found.pop() if len(found) == 1 else "running",
        "created": options.created,
        "deadline_unix_ms": parent.requests[0].deadline_wall_ms,
        **({} if priority == DEFAULT_PRIORITY else {"priority": priority}),
        "slo": {"ttft_ms": goals.ttft_ms, "tpot_ms": goals.tpot_ms, "enforced": goals.is_enforced},
        "on_disconnect": parent.on_disconnect,
        "choices": choices,
        "urls": {"state": path, "events": f"{path}/events", "result": f"{path}/result"},
    }


def _choice(
    status: RequestStatus, log: LogSlice, text: str | None, goals: LatencyGoals, turn: WaitingTurn | None
) -> dict[str, Any]:
    latency, outcomes = latency_of(status), judge(goals, status)
    turn = None if log.end else turn
    error = log.end and end_error(log.end, status.request, goals)
    # A request that waits again has started before: the outcome goes by the window of its first claim.
    starts_by_ms = turn.starts_by_ms if turn and status.first_claimed_ms is None else status.starts_by_ms
    return {
        "index": status.request.choice,
        "status": _STATUS[OwnershipState.ENDED if log.end else status.state],
        "tokens": len(log.tokens),
        "text": text,
        "finish_reason": log.end and log.end.reason,
        "stop_reason": log.end and log.end.stop,
        "error": error and error.detail(),
        "ttft_ms": latency.ttft_ms,
        "tpot_ms": latency.tpot_ms,
        "slo": {goal.value: outcomes.get(goal) for goal in goals.named},
        "first_claimed_unix_ms": status.first_claimed_ms,
        "start_window_ends_unix_ms": starts_by_ms,
        "deadline_outcome": deadline_outcome(status),
        "waiting": turn and {"order": turn.order, "reason": turn.reason, "ahead": turn.ahead},
    }


def state_answer(document: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return the document as an answer. `Location` is its URL."""
    fixed = {"x-request-id": document["id"], "location": document["urls"]["state"]}
    return Response(orjson.dumps(document), status, headers={**fixed, **(headers or {})}, media_type="application/json")
