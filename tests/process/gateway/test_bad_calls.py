"""Thousands of bad calls: none gets a 5xx, every refusal is in OpenAI's shape, what is accepted ends, nothing stays."""

import collections
from typing import Any

import httpx
import orjson
import pytest

from orca.core.domain.request import Request
from orca.core.domain.step import Claim, Epoch, NewRequest, Step
from orca.core.transport.wire import step_to_wire
from support.gateway.bad_calls import COMPLETIONS, MESSAGES, Call, bad_calls, send
from support.gateway.gateway_rig import Rig, check_refusal, error_of, rig, until

SHORT, LONG = 600, 12_000
# On a machine with much else to do.
pytestmark = pytest.mark.timeout(900)
JSON = (b"content-type", b"application/json")


def check_end(response: httpx.Response) -> None:
    """An accepted call has an answer to its end."""
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        last = response.text.rstrip("\n").rpartition("\n\n")[2]
        assert last == "data: [DONE]" or last.startswith(
            ("event: response.completed\n", "event: response.incomplete\n")
        )
        assert '"error":{' not in response.text
    elif response.status_code != 204:
        answer = orjson.loads(response.content)
        assert all(
            choice.get("finish_reason") in ("stop", "length") or "status" in choice
            for choice in answer.get("choices", [])
        )


def check_wire(request: Request) -> None:
    """The stages can be sent it."""
    new = NewRequest(
        handle=1,
        request_id=request.id,
        claim=Claim(1, "p0/1"),
        tokens=request.prompt,
        prompt_length=len(request.prompt),
        max_total_tokens=len(request.prompt) + request.max_new_tokens,
        sampling=request.sampling,
    )
    step_to_wire(Step(epoch=Epoch(1, "p0"), number=1, new=(new,)))


async def fire(one: Rig, seed: int, count: int) -> collections.Counter[str]:
    """Make the calls one by one, check each answer, and check what is left. Returns: answers by kind."""
    seen: list[Request] = []
    accepted: set[str] = set()

    def answer(request: Request) -> Any:
        seen.append(request)
        return (5,) * min(request.max_new_tokens, 20)

    one.scheduler.answer, one.scheduler.tokens_per_turn = answer, 20
    kinds: collections.Counter[str] = collections.Counter()
    for number, call in enumerate(bad_calls(seed, count)):
        try:
            kinds[await judged(one, call, accepted)] += 1
        except Exception as error:
            raise AssertionError(f"call {number} of seed {seed}: {shown(call)}") from error
    await until(lambda: all(record.end for record in one.pool.state.records.values()))
    await until(lambda: not living_readers(one))
    # What was refused cost no iteration, and left no record.
    assert {request.parent for request in seen} == set(one.pool.state.parents) == accepted
    for request in seen:
        check_wire(request)
    return kinds


def living_readers(one: Rig) -> list[str]:
    """Entries that hold a record. That of a call in the background is renewed by nobody, and lapses."""
    pool = one.pool
    return [
        reader
        for parent in pool.state.parents.values()
        for reader, lease_end in parent.readers.items()
        if lease_end > pool.state.awake
    ]


async def judged(one: Rig, call: Call, accepted: set[str]) -> str:
    response = await send(one.app, call)
    if response.status_code >= 400 and call.method != "HEAD":
        code = check_refusal(response)
        assert response.status_code < 500, (response.status_code, response.text)
        return f"{response.status_code} {code}"
    assert response.status_code < 500
    if call.is_generation:
        accepted.add(response.headers["x-request-id"])
        check_end(response)
    return str(response.status_code)


def shown(call: Call) -> str:
    return f"{call.method} {call.path[:80]} {call.headers} {[chunk[:400] for chunk in call.chunks]}"


@pytest.mark.parametrize(
    ("seed", "count"),
    [(1, SHORT), pytest.param(2, LONG, marks=pytest.mark.prove)],
    ids=["short", "long"],
)
async def test_no_malformed_call_gets_a_5xx_or_an_odd_error_and_none_leaves_anything_behind(
    seed: int, count: int
) -> None:
    async with rig() as one:
        kinds = await fire(one, seed, count)
        print(f"{count} calls, seed {seed}: " + ", ".join(f"{kind} x {times}" for kind, times in kinds.most_common()))
        # A corpus whose calls were all refused for one reason would say nothing.
        assert kinds["200"] > count // 20
        assert len(kinds) > 10


NAMELESS = [
    (b'{"prompt": "a", "x": {"": 1, "": 2}}', None),
    (b'{"prompt": "a", "logit_bias": {"' + b"y" * 5000 + b'": "z"}}', "logit_bias." + "y" * 86 + "..."),
]


@pytest.mark.parametrize(("content", "param"), NAMELESS, ids=["empty", "endless"])
async def test_the_name_of_a_bad_field_is_neither_empty_nor_endless(content: bytes, param: str | None) -> None:
    async with rig(schedules=False) as one:
        response = await send(one.app, Call("POST", COMPLETIONS, (JSON,), (content,)))
        assert error_of(response)[1]["param"] == param
        check_refusal(response)


async def test_a_refusal_does_not_echo_a_megabyte() -> None:
    async with rig(schedules=False) as one:
        content = orjson.dumps({"messages": MESSAGES, "prompt": "a", "model": "m" * 1_000_000})
        response = await send(one.app, Call("POST", COMPLETIONS, (JSON,), (content,)))
        assert check_refusal(response) == "model_not_found"
