"""Two releases side by side: what is exported, how parts change hands, and what the system is asked meanwhile."""

import contextlib
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from checker.clients.client import CallProgress, Client
from checker.clients.workload import PlannedCall, chain, with_patterns
from checker.faults.releases import UNITS, SchemaNumber, check_refused_grammars, forming_outcome
from checker.faults.replays import Replay, compare, plan_questions, replay
from checker.history.records import Checked, HandedOver, HistoryWriter
from checker.rules.verdict import judge, table
from checker.systems.checkouts import Release, Releases
from checker.systems.layout import GROUPS, PARTS, Layout, parts_of
from checker.systems.ports import free_ports
from checker.systems.rolling import RollingSystem
from support.checker.history_builders import good_call, good_history


def test_every_part_changes_release_once_each_way_with_both_releases_serving_half_way() -> None:
    assert sorted(part for unit in UNITS for part in unit) == sorted(PARTS)
    assert [*UNITS[0], *UNITS[1]] == ["gateway", *parts_of(0)]


def test_a_part_keeps_its_address_and_gets_those_of_its_group(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "model", tmp_path)
    assert layout.command("gateway") == layout.command("gateway")
    for group in GROUPS:
        stages = ",".join(layout.addresses[f"worker-{group}.{stage}"] for stage in (0, 1))
        assert stages in layout.command(f"scheduler-{group}")
        assert layout.addresses[f"worker-{group}.1"] in layout.command(f"worker-{group}.1")


def test_only_schedulers_of_the_new_release_claim_by_an_order(tmp_path: Path) -> None:
    releases = Releases(Release("one", tmp_path, (1, 2)), Release("two", tmp_path, (2, 3)))
    order = ("--order", "deadline")
    system = RollingSystem(tmp_path, ("--model", str(tmp_path)), releases=releases, order=order)
    commands = {
        (part, each): system.command(part, each) for part in PARTS for each in (releases.before, releases.after)
    }
    ordered = [key for key, command in commands.items() if command[-2:] == list(order)]
    assert ordered == [(f"scheduler-{group}", releases.after) for group in GROUPS]


def test_ports_differ_and_are_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([], ""),
        ([{"message": "epoch over", "reason": "the engine failed: a rank died"}], ""),
        (
            [{"message": "epoch over", "reason": "stage 1 is of another release"}],
            "refused: stage 1 is of another release",
        ),
        ([{"message": "seat taken"}, {"message": "epoch formed"}], "formed"),
    ],
)
def test_the_outcome_of_a_mixed_group_is_read_from_its_schedulers_log(
    lines: list[dict[str, str]], outcome: str
) -> None:
    assert forming_outcome("\n".join(["no record", *map(json.dumps, lines)])) == outcome


def telling(gateway: str = "one", **changes: Any) -> Replay:
    return Replay(**{"gateway": gateway, "request_id": "cmpl-1", "by_key": b"abc", "by_name": b"", **changes})


def journey() -> CallProgress:
    return CallProgress(PlannedCall(name="q0", due_s=0.0, path="/", body={}), request_id="cmpl-1")


def test_gateways_that_send_the_same_bytes_are_right() -> None:
    checks = compare(journey(), [telling(), telling("two")])
    assert {check.rule for check in checks} == {"key_is_one_request", "gateways_tell_alike"}
    assert all(check.is_right for check in checks)


def events(*, has_ids: bool) -> list[bytes]:
    """Two tokens of choice 0, one of choice 1, and what comes behind all of them."""
    places = ((0, 0), (0, 1), (1, 0))
    ids = [f"id: {choice}.{index}\n" if has_ids else "" for choice, index in places]
    parts = [
        json.dumps({"choices": [{"index": choice, "text": index}]}, separators=(",", ":")) for choice, index in places
    ]
    told = [f"{name}data: {part}\n\n" for name, part in zip(ids, parts, strict=True)]
    return [event.encode() for event in (*told, "data: [DONE]\n\n")]


@pytest.mark.parametrize("has_ids", [True, False])
def test_how_choices_interleave_is_no_difference_and_the_order_within_one_is(has_ids: bool) -> None:
    first, second, other, done = events(has_ids=has_ids)
    one = telling(by_name=first + second + other + done)
    assert all(check.is_right for check in compare(journey(), [one, telling(by_name=other + first + second + done)]))
    assert not all(
        check.is_right for check in compare(journey(), [one, telling(by_name=second + first + other + done)])
    )


@pytest.mark.parametrize(
    ("changes", "rule", "found"),
    [
        ({"by_key": b"abX"}, "gateways_tell_alike", "from byte 2 on b'abc' and b'abX'"),
        ({"by_name": b"more"}, "gateways_tell_alike", "from byte 0 on b'' and b'more'"),
        ({"request_id": "cmpl-2"}, "key_is_one_request", "cmpl-2 at two"),
    ],
)
def test_gateways_that_differ_are_reported_with_the_position(changes: dict[str, Any], rule: str, found: str) -> None:
    wrong = [check for check in compare(journey(), [telling(), telling("two", **changes)]) if not check.is_right]
    assert [(check.rule, check.found) for check in wrong] == [(rule, found)]


async def test_a_gateway_that_cannot_read_a_record_is_reported(tmp_path: Path) -> None:
    answers = iter([httpx.Response(503), httpx.Response(500, content=b"broken")])
    with HistoryWriter(tmp_path / "history") as history:
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: next(answers))) as http:
            client = Client(["http://one"], http, history, seed=1, can_resume=True)
            told = await replay(http, "http://one", client, journey())
    assert told == Replay("http://one", None, b"broken", b"")


async def test_a_call_is_repeated_with_its_key_and_its_own_headers(tmp_path: Path) -> None:
    heard: list[httpx.Headers] = []

    def answer(request: httpx.Request) -> httpx.Response:
        heard.append(request.headers)
        return httpx.Response(200, headers={"x-request-id": "cmpl-1"}, content=b"all")

    plan = PlannedCall(name="q0", due_s=0.0, path="/", body={"stream": True}, headers={"x-slo-ttft-ms": "5"})
    with HistoryWriter(tmp_path / "history") as history:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            client = Client(["http://one"], http, history, seed=1, can_resume=True)
            told = await replay(http, "http://one", client, CallProgress(plan, request_id="cmpl-1"))
            assert heard[0]["idempotency-key"] == client.idempotency_key(CallProgress(plan))
    assert told == Replay("http://one", "cmpl-1", b"all", b"all")
    assert heard[0]["x-slo-ttft-ms"] == "5"


def test_questions_end_by_themselves_and_ask_for_log_probabilities_too() -> None:
    plans = plan_questions(chain("m", 100), seed=1, name="q0", count=6)
    assert [plan.name for plan in plans] == [f"q0.{place}" for place in range(6)]
    assert {plan.intent for plan in plans} == {"finish"}
    assert {"logprobs" in plan.body for plan in plans} == {True, False}


async def ask(folder: Path, said: str, schemas: tuple[int, int], *, has_older_parts: bool) -> list[Checked]:
    """Check a newer release with these schema numbers, while `orca pool schema` prints that. Returns: the records."""

    class Pool:
        releases = Releases(Release("one", folder, (1, 1)), Release("two", folder, schemas))
        takes_grammars = False

        async def pool(self, *_: object) -> str:
            return said

    with HistoryWriter(folder / "history") as history:
        scene = SimpleNamespace(history=history, report=lambda _: None)
        numbers = SchemaNumber(cast(Any, scene), cast(Any, Pool()))
        await numbers.check_raise(has_older_parts=has_older_parts)
        return [record for record in history.records if isinstance(record, Checked)]


@pytest.mark.parametrize(
    ("said", "schemas", "has_older_parts", "is_right"),
    [
        ("schema 1 stays in force: a part that lives cannot", (1, 2), True, True),
        ("schema 2 is in force, before it was 1", (1, 2), True, False),
        ("schema 2 is in force, before it was 1", (1, 2), False, True),
        ("schema 1 stays in force: this release cannot", (1, 1), False, True),
    ],
)
async def test_a_number_is_raised_when_the_older_release_has_left_and_not_before(
    tmp_path: Path, said: str, schemas: tuple[int, int], has_older_parts: bool, is_right: bool
) -> None:
    [check] = await ask(tmp_path, said, schemas, has_older_parts=has_older_parts)
    assert (check.rule, check.is_right) == ("number_waits_for_all", is_right)


@pytest.mark.parametrize(
    ("status", "text", "is_right"),
    [
        (400, "structured_outputs needs schema 3", True),
        (400, "some field is unknown", False),
        (200, "structured_outputs", False),
    ],
)
async def test_a_grammar_that_is_not_refused_by_name_is_reported(
    tmp_path: Path, status: int, text: str, is_right: bool
) -> None:
    releases = Releases(Release("one", tmp_path, (1, 2)), Release("two", tmp_path, (2, 3)))
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=text))
    system = SimpleNamespace(
        takes_grammars=False,
        addresses={"gateway": "one", "gateway-1": "two"},
        releases=releases,
        release_of=lambda _: releases.after,
    )
    with HistoryWriter(tmp_path / "history") as history:
        async with httpx.AsyncClient(transport=transport) as http:
            settings = SimpleNamespace(prompt_source=with_patterns(chain("m", 100), seed=1))
            scene = SimpleNamespace(history=history, http=http, settings=settings)
            await check_refused_grammars(cast(Any, scene), cast(Any, system))
            system.takes_grammars = True
            await check_refused_grammars(cast(Any, scene), cast(Any, system))
        found = [record for record in history.records if isinstance(record, Checked)]
    assert [(one.rule, one.is_right) for one in found] == [("grammars_wait_for_schema", is_right)] * 2


def test_a_wrong_answer_to_a_check_is_a_violation_and_handovers_are_counted() -> None:
    handed = HandedOver(at=2.0, part="gateway", release="after", in_flight=("c0",), seconds=1.0, exit_code=0)
    wrong = Checked(at=3.0, rule="gateways_tell_alike", subject="q0", expected="equal", found="b", is_right=False)
    verdict = judge([*good_history(good_call()), handed, wrong])
    assert (verdict.handovers, verdict.checks, verdict.harms["misstated"]) == (1, {"gateways_tell_alike": 1}, 1)
    assert "1 hand-overs between releases; checks: gateways_tell_alike 1" in table(verdict)
