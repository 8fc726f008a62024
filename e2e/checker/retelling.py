"""Asks all gateways for the same ended calls, by their keys and by their names: every byte must be the same.

Rendering is a pure function of log and parameters, so a gateway of another release that writes otherwise would revise
what a client has heard before it came there.
"""

import asyncio
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import httpx

from checker.client import Client, Journey
from checker.history import Checked
from checker.run import Scene
from checker.workload import PlannedCall, Speech, plan_calls

TELLS_WITHIN_S = 40.0
"""A gateway is asked again for so long: it may have been killed, or the pool; less than an ended request is kept."""
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
    journeys = await asyncio.gather(*(scene.client.call(plan) for plan in plans))
    async with httpx.AsyncClient(timeout=httpx.Timeout(20.0)) as http:
        for journey in journeys:
            tellings = [await retell(http, url, scene.client, journey) for url in scene.system.urls]
            for record in compare(journey, [telling for telling in tellings if telling is not None]):
                scene.history.add(record)
            if None in tellings:
                scene.tell(f"  {journey.plan.name} was not told again by every gateway in {TELLS_WITHIN_S:g} s")


def plan_questions(speech: Speech, *, seed: int, name: str, count: int) -> list[PlannedCall]:
    """Calls that end by themselves, some of them with log probabilities."""
    number = seed + sum(name.encode())
    drawn = plan_calls(
        speech, seed=number, count=count * PLANNED_PER_QUESTION, rate=1.0, max_tokens=(3, 30), drops=False
    )
    chosen = [plan for plan in drawn if plan.intent == "finish"][:count]
    return [
        replace(plan, name=f"{name}.{place}", body=plan.body | ({"logprobs": 2} if place % 2 else {}))
        for place, plan in enumerate(chosen)
    ]


async def retell(http: httpx.AsyncClient, url: str, client: Client, journey: Journey) -> Telling | None:
    """One gateway's telling; None when it does not come in time."""
    ends = time.monotonic() + TELLS_WITHIN_S
    headers = {"idempotency-key": client.key_of(journey)}
    while time.monotonic() < ends:
        try:
            post = await http.post(url + journey.plan.path, json=journey.plan.body, headers=headers)
            events = b""
            if journey.plan.body.get("stream"):
                events = (await http.get(f"{url}/v1/requests/{journey.request_id}/events")).content
        except httpx.HTTPError:
            await asyncio.sleep(0.5)
            continue
        if post.status_code == 200:
            return Telling(url, post.headers.get("x-request-id"), post.content, events)
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
            first, second = getattr(one, how), getattr(other, how)
            if first or second:
                found = "equal bytes" if first == second else _difference(first, second)
                checks.append(
                    _check(at, "gateways_tell_alike", f"{subject} {how}", "equal bytes", found, first == second)
                )
    return checks


def _check(at: float, rule: str, subject: str, expected: str, found: str, is_right: bool) -> Checked:
    return Checked(at=at, rule=rule, subject=subject, expected=expected, found=found, is_right=is_right)


def _difference(one: bytes, other: bytes) -> str:
    place = next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    around = slice(max(0, place - 40), place + 60)
    return f"from byte {place} on {one[around]!r} and {other[around]!r}"
