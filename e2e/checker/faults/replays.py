"""Requests the same ended calls from all gateways, by their keys and by their ids: every byte must be equal.

Rendering is a pure function of log and parameters. If a gateway of another release rendered differently, it would
revise what a client has received before.
"""

import asyncio
import re
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import httpx

from checker.clients.client import CallProgress, Client
from checker.clients.workload import PlannedCall, PromptSource, plan_calls
from checker.history.records import Checked
from checker.oracles.expectations import chain_expectations
from checker.runs.context import RunContext

REPLAY_WITHIN_S, ANSWER_S = 25.0, 10.0
"""Time for repeated calls to a gateway that was killed or lost the pool, and timeout of each answer. Their sum is well
under the retention of an ended request (checker.runs.run.RETENTION_S)."""
TRY_AGAIN = (429, 503)
GOALS = {"x-slo-ttft-ms": "60000"}
PLANNED_PER_QUESTION = 3
"""Planned calls per chosen one; only calls with the intent to finish are chosen."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A call as one gateway replays it."""

    gateway: str
    request_id: str | None
    by_key: bytes  # the answer to the same POST again
    by_name: bytes  # the events from the start, by request id; empty for a call without a stream


async def check_replays(context: RunContext, *, count: int) -> None:
    """Make `count` calls of all shapes, and check each by replays from every gateway."""
    first = sum(isinstance(record, Checked) for record in context.history.records)
    source = context.settings.prompt_source
    if not context.system.takes_grammars:
        source = replace(source, constraints=())
    plans = plan_questions(source, seed=context.settings.seed, name=f"q{first}", count=count)
    if context.settings.is_chain:
        for expected in await asyncio.to_thread(chain_expectations, context.settings.model, plans, at=time.monotonic()):
            context.history.add(expected)
    async with httpx.AsyncClient(timeout=httpx.Timeout(ANSWER_S)) as http:
        await asyncio.gather(*(_ask_one(context, http, plan) for plan in plans))


async def _ask_one(context: RunContext, http: httpx.AsyncClient, plan: PlannedCall) -> None:
    """Replay a call directly after its end, from all gateways at once: an expired request would be computed again."""
    progress = await context.run_call(plan)
    replays = await asyncio.gather(*(replay(http, url, context.client, progress) for url in context.system.urls))
    for record in compare(progress, [one_replay for one_replay in replays if one_replay is not None]):
        context.history.add(record)
    if None in replays:
        context.report(f"  {progress.plan.name} was not replayed by every gateway within {REPLAY_WITHIN_S:g} s")


def plan_questions(prompt_source: PromptSource, *, seed: int, name: str, count: int) -> list[PlannedCall]:
    """Plan calls that end by themselves, some with log probabilities, or with goals that a release may not know."""
    number = seed + sum(name.encode())
    drawn = plan_calls(
        prompt_source, seed=number, count=count * PLANNED_PER_QUESTION, rate=1.0, max_tokens=(3, 30), drops=False
    )
    chosen = [plan for plan in drawn if plan.intent == "finish"][:count]
    return [
        replace(
            plan,
            name=f"{name}.{place}",
            body=plan.body | ({"logprobs": 2} if place % 2 else {}),
            headers=GOALS if place % 3 == 0 else {},
        )
        for place, plan in enumerate(chosen)
    ]


async def replay(http: httpx.AsyncClient, url: str, client: Client, progress: CallProgress) -> Replay | None:
    """Return one gateway's replay; None if it does not come in time."""
    ends = time.monotonic() + REPLAY_WITHIN_S
    headers = {"idempotency-key": client.idempotency_key(progress), **progress.plan.headers}
    while time.monotonic() < ends:
        try:
            post = await http.post(url + progress.plan.path, json=progress.plan.body, headers=headers)
            answers = [post]
            if progress.plan.body.get("stream"):
                answers.append(await http.get(f"{url}/v1/requests/{progress.request_id}/events"))
        except httpx.HTTPError:
            answers = []
        # Any other answer, including an error of the server, is this gateway's replay.
        if answers and not any(answer.status_code in TRY_AGAIN for answer in answers):
            post, *events = answers
            by_name = events[0].content if events else b""
            return Replay(url, post.headers.get("x-request-id"), post.content, by_name)
        await asyncio.sleep(0.5)
    return None


def compare(progress: CallProgress, replays: list[Replay]) -> list[Checked]:
    """Check that all replays of one call have the same request and equal bytes."""
    at, subject = time.monotonic(), f"{progress.plan.name} ({progress.request_id})"
    checks = []
    for one_replay in replays:
        found = f"{one_replay.request_id} at {one_replay.gateway}"
        is_same = one_replay.request_id == progress.request_id
        checks.append(_check(at, "key_is_one_request", subject, f"{progress.request_id}", found, is_same))
    for one, other in pairwise(replays):
        for how in ("by_key", "by_name"):
            first, second = in_order_of_choices(getattr(one, how)), in_order_of_choices(getattr(other, how))
            if first or second:
                found = "equal bytes" if first == second else _difference(first, second)
                checks.append(
                    _check(at, "gateways_tell_alike", f"{subject} {how}", "equal bytes", found, first == second)
                )
    return checks


def in_order_of_choices(answer: bytes) -> bytes:
    """Sort the events of a stream by choice, because the order of events of different choices is not promised."""
    events = answer.split(b"\n\n")
    events.sort(key=_choice_of)
    return b"\n\n".join(events)


def _choice_of(event: bytes) -> int:
    # Events have ids if the client requests them. In an error of one choice, only the id names the choice.
    choice = re.search(rb'^id: (\d+)\.|"choices":\[\{"index":(\d+)', event)
    return int(choice[1] or choice[2]) if choice else sys.maxsize


def _check(at: float, rule: str, subject: str, expected: str, found: str, is_right: bool) -> Checked:
    return Checked(at=at, rule=rule, subject=subject, expected=expected, found=found, is_right=is_right)


def _difference(one: bytes, other: bytes) -> str:
    place = next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    around = slice(max(0, place - 40), place + 60)
    return f"from byte {place} on {one[around]!r} and {other[around]!r}"
