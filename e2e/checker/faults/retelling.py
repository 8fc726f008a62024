"""Asks all gateways for the same ended calls, by their keys and by their names: every byte must be the same.

Rendering is a pure function of log and parameters, so a gateway of another release that writes otherwise would revise
what a client has heard before it came there.
"""

import asyncio
import re
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import httpx

from checker.clients.client import Client, Journey
from checker.clients.workload import PlannedCall, Speech, plan_calls
from checker.history.records import Checked
from checker.oracles.expectations import chain_expectations
from checker.runs.run import Scene

TELLS_WITHIN_S, ANSWER_S = 25.0, 10.0
"""A gateway that was killed, or lost the pool, is asked again for so long, and each answer may take so long: together
well under the time for which an ended request is kept (checker.runs.run.RETENTION_S)."""
COME_BACK = (429, 503)
GOALS = {"x-slo-ttft-ms": "60000"}
PLANNED_PER_QUESTION = 3
"""Calls that are meant to finish are chosen out of so many."""


@dataclass(frozen=True, slots=True)
class Telling:
    """What one gateway says of a call."""

    gateway: str
    request_id: str | None
    by_key: bytes  # the answer to the same POST again
    by_name: bytes  # the events from the start; empty for a call without a stream


async def ask_retelling(scene: Scene, *, count: int) -> None:
    """Make `count` calls of all shapes and have each told again by every gateway."""
    first = sum(isinstance(record, Checked) for record in scene.history.records)
    plans = plan_questions(scene.settings.speech, seed=scene.settings.seed, name=f"q{first}", count=count)
    if scene.settings.is_chain:
        for expected in await asyncio.to_thread(chain_expectations, scene.settings.model, plans, at=time.monotonic()):
            scene.history.add(expected)
    async with httpx.AsyncClient(timeout=httpx.Timeout(ANSWER_S)) as http:
        await asyncio.gather(*(_ask_one(scene, http, plan) for plan in plans))


async def _ask_one(scene: Scene, http: httpx.AsyncClient, plan: PlannedCall) -> None:
    """At once when it has ended, all gateways at a time: a request that is forgotten would be computed anew."""
    journey = await scene.follow(plan)
    tellings = await asyncio.gather(*(retell(http, url, scene.client, journey) for url in scene.system.urls))
    for record in compare(journey, [telling for telling in tellings if telling is not None]):
        scene.history.add(record)
    if None in tellings:
        scene.tell(f"  {journey.plan.name} was not told again by every gateway in {TELLS_WITHIN_S:g} s")


def plan_questions(speech: Speech, *, seed: int, name: str, count: int) -> list[PlannedCall]:
    """Calls that end by themselves, some of them with log probabilities, or with goals that a release may not know."""
    number = seed + sum(name.encode())
    drawn = plan_calls(
        speech, seed=number, count=count * PLANNED_PER_QUESTION, rate=1.0, max_tokens=(3, 30), drops=False
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


async def retell(http: httpx.AsyncClient, url: str, client: Client, journey: Journey) -> Telling | None:
    """One gateway's telling; None when it does not come in time."""
    ends = time.monotonic() + TELLS_WITHIN_S
    headers = {"idempotency-key": client.key_of(journey), **journey.plan.headers}
    while time.monotonic() < ends:
        try:
            post = await http.post(url + journey.plan.path, json=journey.plan.body, headers=headers)
            answers = [post]
            if journey.plan.body.get("stream"):
                answers.append(await http.get(f"{url}/v1/requests/{journey.request_id}/events"))
        except httpx.HTTPError:
            answers = []
        # Any other answer, a fault of the server's own too, is what this gateway says.
        if answers and not any(answer.status_code in COME_BACK for answer in answers):
            post, *events = answers
            by_name = events[0].content if events else b""
            return Telling(url, post.headers.get("x-request-id"), post.content, by_name)
        await asyncio.sleep(0.5)
    return None


def compare(journey: Journey, tellings: list[Telling]) -> list[Checked]:
    """What the tellings of one call have to say about keys and bytes."""
    at, subject = time.monotonic(), f"{journey.plan.name} ({journey.request_id})"
    checks = []
    for telling in tellings:
        found = f"{telling.request_id} at {telling.gateway}"
        is_same = telling.request_id == journey.request_id
        checks.append(_check(at, "key_is_one_request", subject, f"{journey.request_id}", found, is_same))
    for one, other in pairwise(tellings):
        for how in ("by_key", "by_name"):
            first, second = in_order_of_choices(getattr(one, how)), in_order_of_choices(getattr(other, how))
            if first or second:
                found = "equal bytes" if first == second else _difference(first, second)
                checks.append(
                    _check(at, "gateways_tell_alike", f"{subject} {how}", "equal bytes", found, first == second)
                )
    return checks


def in_order_of_choices(answer: bytes) -> bytes:
    """The events of a stream, choice after choice: how those of several choices interleave is promised to nobody."""
    events = answer.split(b"\n\n")
    events.sort(key=_choice_of)
    return b"\n\n".join(events)


def _choice_of(event: bytes) -> int:
    # Events have ids where the client asks for them; an error of one choice has nothing else that tells whose it is.
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
