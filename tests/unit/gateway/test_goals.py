"""Latency goals: what they ask, how requests are judged by them, and what changes where they are enforced."""

from dataclasses import replace
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orca.core.domain.errors import NeverFits
from orca.core.domain.request import End, FinishReason, Request
from orca.gateway.answer.tracing import Tracing
from orca.gateway.latency_goals import (
    NO_GOALS,
    AskedDeadline,
    Goal,
    GoalOutcome,
    LatencyGoals,
    judge,
    latency_of,
    summary,
)
from orca.gateway.metrics import GatewayMetrics
from orca.gateway.render.render import RenderOptions
from orca.gateway.settings import GatewaySettings
from orca.pool.memory.pool import MemoryPool
from orca.pool.order.order_class import DeadlineKind, OrderClass
from orca.pool.records import OwnershipState, RequestStatus, Submission
from support.gateway.gateway_rig import MODEL, WORDS, Rig, WallClock, error_of, events, make_request, rig, until
from support.gateway.gateway_server import served
from support.gateway.overloads import by_order, observed

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODY = {"prompt": "the fox", "max_tokens": 50, "messages": [{"role": "user", "content": "the fox"}]}
SOFT = GatewaySettings(model="tiny", round_seconds=0.05)
ENFORCING = GatewaySettings(model="tiny", round_seconds=0.05, slo_enforce=True)
LOOSE = {"x-slo-ttft-ms": "600000", "x-slo-tpot-ms": "600000.5"}
TIGHT = {"x-slo-ttft-ms": "0.001", "x-slo-tpot-ms": "0.000001"}
BOTH = LatencyGoals(ttft_ms=100, tpot_ms=10)
MET, MISSED = GoalOutcome.MET, GoalOutcome.MISSED
SUBMITTED_MS = 1_700_000_000_000


def status(
    *, first: int | None = None, ended: int | None = None, tokens: int = 0, reason: FinishReason = FinishReason.STOP
) -> RequestStatus:
    """Return the status of a request of at most 11 tokens; times in milliseconds from its submission."""
    return RequestStatus(
        request=replace(make_request(max_new_tokens=11), submitted_ms=SUBMITTED_MS),
        state=OwnershipState.OWNED if ended is None else OwnershipState.ENDED,
        owner=None,
        claim=None,
        tokens=tokens,
        end=None if ended is None else End(reason, tokens),
        first_claimed_ms=None,
        first_token_ms=None if first is None else SUBMITTED_MS + first,
        ended_ms=None if ended is None else SUBMITTED_MS + ended,
    )


def counted(metrics: GatewayMetrics) -> dict[tuple[str, str], float]:
    """(goal, outcome) -> requests; those that none was counted for are left out."""
    [family] = [family for family in metrics.registry.collect() if family.name == "orca_request_slo"]
    assert {sample.labels["model_name"] for sample in family.samples} == {MODEL.name}
    return {
        (sample.labels["goal"], sample.labels["outcome"]): sample.value
        for sample in family.samples
        if sample.name == "orca_request_slo_total" and sample.value
    }


async def post(one: Rig, headers: dict[str, str], path: str = COMPLETIONS, **body: Any) -> Any:
    return await one.client.post(path, json=BODY | body, headers=headers)


async def state(one: Rig, request_id: str) -> dict[str, Any]:
    document: dict[str, Any] = (await one.client.get(f"/v1/requests/{request_id}")).json()
    return document


@pytest.mark.parametrize(
    ("seen", "outcomes"),
    [
        (status(), {}),
        (status(first=100, tokens=1), {Goal.TTFT: MET}),
        (status(first=101, tokens=1), {Goal.TTFT: MISSED}),
        (status(first=50, ended=150, tokens=11), {Goal.TTFT: MET, Goal.TPOT: MET}),
        (status(first=50, ended=151, tokens=11), {Goal.TTFT: MET, Goal.TPOT: MISSED}),
        (status(first=50, ended=50, tokens=1), {Goal.TTFT: MET}),
        (status(ended=100, reason=FinishReason.CANCELLED), {}),
        (status(ended=101, reason=FinishReason.CANCELLED), {Goal.TTFT: MISSED}),
        (status(ended=5, reason=FinishReason.ERROR), {Goal.TTFT: MISSED}),
        (status(first=50, ended=149, tokens=2, reason=FinishReason.CANCELLED), {Goal.TTFT: MET}),
        (
            status(first=50, ended=150, tokens=10, reason=FinishReason.DEADLINE_EXCEEDED),
            {Goal.TTFT: MET, Goal.TPOT: MISSED},
        ),
    ],
    ids=[
        "nothing yet",
        "first token in time",
        "first token late",
        "fast",
        "slow",
        "one token has no mean",
        "cancelled in time",
        "cancelled too late",
        "failed",
        "cancelled while it could still be met",
        "cut off when it could not",
    ],
)
def test_a_goal_is_judged_when_it_is_decided(seen: RequestStatus, outcomes: dict[Goal, GoalOutcome]) -> None:
    assert judge(BOTH, seen) == outcomes


def test_a_client_that_left_after_its_goal_without_a_token_counts_as_missed() -> None:
    assert judge(BOTH, status(), waited_ms=100) == {}
    assert judge(BOTH, status(), waited_ms=101) == {Goal.TTFT: MISSED}


def test_a_clock_that_was_set_back_gives_no_negative_times() -> None:
    latency = latency_of(status(first=-50, ended=-60, tokens=3))
    assert (latency.ttft_ms, latency.tpot_ms) == (0, 0)


def test_a_summary_has_the_slowest_choice_and_the_number_of_missed_goals() -> None:
    found = {"p.0": status(first=50, ended=150, tokens=11), "p.1": status(first=70, ended=370, tokens=11)}
    assert summary(BOTH, found) == {
        "slo_ttft_ms": 100,
        "slo_ttft_missed": 0,
        "ttft_ms": 70,
        "slo_tpot_ms": 10,
        "slo_tpot_missed": 1,
        "tpot_ms": 30,
    }


def test_soft_goals_set_no_deadline_and_enforced_goals_keep_the_earlier_deadline() -> None:
    assert (BOTH.first_token_deadline_ms, BOTH.deadline_ms(None, 11), BOTH.deadline_ms(70, 11)) == (None, None, 70)
    hard = LatencyGoals(ttft_ms=99.5, tpot_ms=10, is_enforced=True)
    assert (hard.first_token_deadline_ms, hard.deadline_ms(None, 11), hard.deadline_ms(70, 11)) == (100, 200, 70)
    assert LatencyGoals(tpot_ms=10, is_enforced=True).deadline_ms(None, 11) is None
    assert LatencyGoals(ttft_ms=10, is_enforced=True).deadline_ms(None, 11) is None


HARD = replace(BOTH, is_enforced=True)


@pytest.mark.parametrize(
    ("goals", "request_", "tokens", "expected"),
    [
        (HARD, make_request(max_new_tokens=11), 0, ("x-slo-ttft-ms", 100, "first token")),
        (HARD, make_request(max_new_tokens=11), 1, ("x-slo-tpot-ms", 200, "end", "x-slo-ttft-ms")),
        (HARD, make_request(max_new_tokens=1), 0, ("x-slo-ttft-ms", 100, "first token")),
        (replace(HARD, tpot_ms=None), make_request(), 1, None),
        (BOTH, make_request(), 0, None),
    ],
    ids=["first token", "all tokens", "one token is the first", "met", "soft"],
)
@pytest.mark.parametrize("asked_ms", [None, 70, 150, 1000])
def test_the_soonest_deadline_is_in_force(
    goals: LatencyGoals, request_: Request, tokens: int, expected: tuple[Any, ...] | None, asked_ms: int | None
) -> None:
    stored = replace(
        request_,
        deadline_ms=goals.deadline_ms(asked_ms, request_.max_new_tokens),
        first_token_deadline_ms=goals.first_token_deadline_ms,
    )
    if asked_ms is not None and (expected is None or asked_ms < expected[1]):
        expected = ("deadline_ms", asked_ms, "end")
    assert goals.deadline_in_force(stored, tokens) == (None if expected is None else AskedDeadline(*expected))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["", "0", "-1", "1e3", "nan", "inf", "fast", "1 ms", "2147483649", "1, 2", "٣"])
async def test_a_bad_goal_is_refused_with_the_name_of_its_header(path: str, name: str, value: str) -> None:
    async with rig(schedules=False) as one:
        response = await one.client.post(path, json=BODY, headers=[(name.encode(), value.encode())])
        code, error = error_of(response)
        assert (code, error["type"], error["param"]) == (400, "invalid_request_error", name)


async def test_goals_have_the_names_of_llm_d_too() -> None:
    async with rig(schedules=False) as one:
        headers = {"x-llm-d-slo-ttft-ms": "600000", "x-llm-d-slo-tpot-ms": "20.5", "x-slo-tpot-ms": "20.50"}
        answer = await post(one, headers, background=True)
        document = await state(one, answer.json()["id"])
        assert document["slo"] == {"ttft_ms": 600_000, "tpot_ms": 20.5, "enforced": False}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("goal", ["ttft", "tpot"])
async def test_two_names_of_a_goal_with_different_values_are_refused(path: str, goal: str) -> None:
    async with rig(schedules=False) as one:
        response = await post(one, {f"x-slo-{goal}-ms": "100", f"x-llm-d-slo-{goal}-ms": "100.5"}, path)
        code, error = error_of(response)
        assert (code, error["param"]) == (400, f"x-slo-{goal}-ms")
        assert error["message"] == f"x-slo-{goal}-ms: is 100, but x-llm-d-slo-{goal}-ms is 100.5; send one of them"
        assert one.pool.state.records == {}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_goals_are_reported_in_the_state_and_counted(path: str) -> None:
    async with rig() as one:
        answer = await post(one, LOOSE, path, n=2)
        document = await state(one, answer.json()["id"])
        assert document["slo"] == {"ttft_ms": 600_000, "tpot_ms": 600_000.5, "enforced": False}
        for choice in document["choices"]:
            assert choice["slo"] == {"ttft": "met", "tpot": "met"}
            assert 0 <= choice["ttft_ms"] <= 600_000
            assert 0 <= choice["tpot_ms"] <= 600_000
        metrics = one.app.state.gateway.metrics
        await until(lambda: counted(metrics) == {("ttft", "met"): 2, ("tpot", "met"): 2})


@pytest.mark.parametrize("stream", [False, True])
async def test_missed_goals_end_no_request_and_change_no_byte(stream: bool) -> None:
    async with rig(settings=SOFT) as one:
        one.scheduler.turn_seconds = 0.005
        answer = await post(one, TIGHT, stream=stream)
        assert answer.status_code == 200
        assert "slo" not in answer.text
        assert "ttft" not in answer.text
        request_id = answer.headers["x-request-id"]
        assert (await state(one, request_id))["choices"][0]["text"] == WORDS
        assert one.pool.state.records[f"{request_id}.0"].request.deadline_wall_ms is None
        metrics = one.app.state.gateway.metrics
        await until(lambda: counted(metrics) == {("ttft", "missed"): 1, ("tpot", "missed"): 1})


@pytest.mark.parametrize(
    ("headers", "goal_ms"),
    [
        ({"x-slo-ttft-ms": "250"}, 250),
        ({"x-llm-d-slo-ttft-ms": "250.2", "x-slo-tpot-ms": "9"}, 251),
        ({"x-slo-ttft-ms": "0.001"}, 1),
        ({"x-slo-tpot-ms": "9"}, None),
        ({}, None),
    ],
    ids=["ttft", "both", "least", "tpot", "none"],
)
async def test_a_soft_goal_for_the_first_token_is_stored_to_order_claims(
    headers: dict[str, str], goal_ms: int | None
) -> None:
    async with rig(schedules=False) as one:
        await post(one, headers, n=2, background=True)
        found = [record.request for record in one.pool.state.records.values()]
        assert [request.first_token_goal_ms for request in found] == [goal_ms] * 2
        assert {request.first_deadline_wall_ms for request in found} == {None}


async def test_an_enforced_goal_is_a_deadline_and_orders_claims_as_one() -> None:
    async with rig(settings=ENFORCING, schedules=False) as one:
        await post(one, LOOSE, background=True)
        [record] = one.pool.state.records.values()
        assert (record.request.first_token_goal_ms, record.request.first_token_deadline_ms) == (None, 600_000)


@pytest.mark.parametrize("known", [2, 3])
async def test_a_goal_refuses_no_call_before_the_schema_that_stores_it(known: int) -> None:
    """The gateway may learn late that an older schema is in force again."""
    async with rig(schedules=False) as one:
        await one.pool.set_schema(2)
        one.app.state.gateway.models.schema = known
        answer = await post(one, LOOSE, background=True)
        assert answer.status_code == 202, answer.text
        [record] = one.pool.state.records.values()
        assert record.request.first_token_goal_ms is None
        document = await state(one, answer.json()["id"])
        assert document["slo"] == {"ttft_ms": 600_000, "tpot_ms": 600_000.5, "enforced": False}


class UnsettledPool(MemoryPool):
    """Refuses the first calls, each for another promise of slots."""

    def __init__(self) -> None:
        super().__init__(WallClock())
        self.promises = [60, 61]

    async def submit(self, submission: Submission) -> tuple[Request, ...]:
        if self.promises:
            raise NeverFits(200, self.promises.pop())
        return await super().submit(submission)


async def test_a_goal_refuses_no_call_whose_other_tries_are_spent() -> None:
    async with rig(pool=UnsettledPool(), schedules=False) as one:
        await one.pool.set_schema(2)
        one.app.state.gateway.models.schema = 3
        answer = await post(one, LOOSE, background=True)
        assert answer.status_code == 202, answer.text


async def test_a_goal_that_nobody_can_meet_is_not_refused_under_an_order() -> None:
    waiting = by_order({OrderClass(0, 2, 6, DeadlineKind.END): 100}, 100, least_step_ms=100.0)
    async with rig(schedules=False) as one:
        one.app.state.gateway.overload = await observed(seconds=10, queued=100, ends_per_second=1, by_order=waiting)
        assert (await post(one, TIGHT, background=True)).status_code == 202


async def test_a_call_without_goals_is_timed_and_not_counted() -> None:
    async with rig() as one:
        answer = await one.complete()
        document = await state(one, answer["id"])
        assert document["slo"] == {"ttft_ms": None, "tpot_ms": None, "enforced": False}
        assert document["choices"][0]["slo"] == {}
        assert document["choices"][0]["ttft_ms"] >= 0
        assert not one.app.state.gateway.finishing
        assert counted(one.app.state.gateway.metrics) == {}


async def test_a_client_that_leaves_before_its_first_token_is_counted_as_missed() -> None:
    async with served(replace(SOFT, port=0)) as one, httpx.AsyncClient(base_url=one.url) as client:
        one.rig.scheduler.may_run.clear()
        async with client.stream("POST", COMPLETIONS, json=BODY | {"stream": True}, headers=TIGHT):
            pass
        metrics = one.rig.app.state.gateway.metrics
        await until(lambda: counted(metrics) == {("ttft", "missed"): 1})
        one.rig.scheduler.may_run.set()


async def test_a_resumed_stream_is_counted_once_over_all_gateways() -> None:
    async with rig() as one, rig(pool=one.pool, schedules=False) as two:
        answer = await post(one, LOOSE, stream=True)
        metrics = one.app.state.gateway.metrics
        await until(lambda: counted(metrics) == {("ttft", "met"): 1, ("tpot", "met"): 1})
        await two.client.get(f"/v1/requests/{answer.headers['x-request-id']}/events")
        await until(lambda: not two.app.state.gateway.finishing)
        assert counted(two.app.state.gateway.metrics) == {}


async def test_an_enforced_goal_ends_a_request_without_a_token() -> None:
    async with rig(settings=ENFORCING) as one:
        one.scheduler.may_run.clear()
        code, error = error_of(await post(one, {"x-slo-ttft-ms": "50"}))
        assert (code, error["code"]) == (504, "deadline_exceeded")
        [record] = one.pool.state.records.values()
        assert record.end == End(FinishReason.DEADLINE_EXCEEDED, 0)
        metrics = one.app.state.gateway.metrics
        await until(lambda: counted(metrics) == {("ttft", "missed"): 1})
        one.scheduler.may_run.set()


BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "the fox"},
    CHAT: {"messages": BODY["messages"]},
    RESPONSES: {"input": "the fox"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "deadline_ms", "param", "words"),
    [
        ({"x-slo-ttft-ms": "49.5"}, None, "x-slo-ttft-ms", "x-slo-ttft-ms allowed 50 ms until the first token"),
        ({"x-llm-d-slo-ttft-ms": "60000"}, 50, "deadline_ms", "deadline_ms allowed 50 ms until the end"),
    ],
    ids=["goal", "deadline"],
)
async def test_the_error_names_the_field_or_header_whose_deadline_passed(
    path: str, stream: bool, headers: dict[str, str], deadline_ms: int | None, param: str, words: str
) -> None:
    async with rig(settings=ENFORCING) as one:
        one.scheduler.may_run.clear()
        body = BODIES[path] | {"stream": stream, "deadline_ms": deadline_ms}
        answer = await one.client.post(path, json=body, headers=headers)
        one.scheduler.may_run.set()
        fields = {"code": "deadline_exceeded", "message": f"the request's deadline passed ({words})"}
        whole = fields | {"type": "timeout_error", "param": param}
        [choice] = (await state(one, answer.headers["x-request-id"]))["choices"]
        assert choice["error"] == whole
        if not stream:
            assert error_of(answer) == (504, whole)
            return
        last = list(events(answer.text))[-1][1]
        if path == RESPONSES:
            assert last["response"]["error"] == fields
        else:
            assert last["error"] == whole


async def test_an_enforced_goal_keeps_a_request_that_has_its_first_token() -> None:
    async with rig(settings=ENFORCING) as one:
        answer = await post(one, {"x-slo-ttft-ms": "60000"})
        assert answer.json()["choices"][0]["text"] == WORDS
        [record] = one.pool.state.records.values()
        assert (record.request.first_token_deadline_ms, record.request.deadline_ms) == (60_000, None)


async def test_both_enforced_goals_bound_the_whole_request() -> None:
    async with rig(settings=ENFORCING) as one:
        one.scheduler.turns_left = 1
        answer = await post(one, {"x-slo-ttft-ms": "2000", "x-slo-tpot-ms": "1"}, max_tokens=3)
        _, error = error_of(answer)
        assert (error["code"], error["param"]) == ("deadline_exceeded", "x-slo-tpot-ms")
        assert "x-slo-ttft-ms and x-slo-tpot-ms allowed 2002 ms until the end" in error["message"]
        [record] = one.pool.state.records.values()
        assert (record.request.deadline_ms, record.end) == (2_002, End(FinishReason.DEADLINE_EXCEEDED, 1))


async def test_enforced_goals_refuse_a_call_whose_first_token_cannot_come_in_time() -> None:
    headers = {"x-slo-ttft-ms": "1000"}
    async with rig(settings=ENFORCING, schedules=False) as hard, rig(settings=SOFT, schedules=False) as soft:
        for one in (hard, soft):
            one.app.state.gateway.overload = await observed(seconds=10, queued=100, ends_per_second=10)
        code, error = error_of(await post(hard, headers))
        assert (code, error["code"], error["param"]) == (429, "deadline_unreachable", "x-slo-ttft-ms")
        assert (await post(soft, headers, background=True)).status_code == 202


async def test_spans_show_the_goals_and_their_outcome() -> None:
    exporter = InMemorySpanExporter()
    async with rig(tracing=Tracing(exporter)) as one:
        await post(one, LOOSE)
    [span] = [span for span in exporter.get_finished_spans() if span.name == f"POST {COMPLETIONS}"]
    assert span.attributes is not None
    assert span.attributes["orca.slo_ttft_ms"] == 600_000
    assert span.attributes["orca.slo_tpot_missed"] == 0
    assert float(str(span.attributes["orca.ttft_ms"])) >= 0


async def test_the_openapi_document_describes_the_headers() -> None:
    async with rig(schedules=False) as one:
        document = (await one.client.get("/openapi.json")).json()
        for path in (COMPLETIONS, CHAT):
            parameters = {one["name"]: one for one in document["paths"][path]["post"]["parameters"]}
            names = {"x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"}
            assert names < set(parameters)
            assert {one["in"] for one in parameters.values()} == {"header"}


async def test_without_goals_the_previous_release_can_read_the_record() -> None:
    async with rig() as one:
        await one.complete()
        await post(one, LOOSE)
        plain, asked = (RenderOptions.from_json(parent.submission.render) for parent in one.pool.state.parents.values())
        assert ["goals" in parent.submission.render for parent in one.pool.state.parents.values()] == [False, True]
        assert (plain.goals, asked.goals) == (NO_GOALS, LatencyGoals(ttft_ms=600_000, tpot_ms=600_000.5))
