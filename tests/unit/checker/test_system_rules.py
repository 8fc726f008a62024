"""Rules for the whole system: no work is wasted, claims rise, all of it comes to rest."""

from checker.history.records import (
    Claimed,
    Closed,
    Event,
    Fault,
    GroupNews,
    Ran,
    Record,
    Refused,
    Resources,
    Sent,
    Strangers,
    SystemEnded,
)
from checker.rules.verdict import judge, table
from support.checker.history_builders import decode, good_call, good_history


def rules(history: list[Record]) -> list[str]:
    return [found.rule for found in judge(history, decode).violations]


def refused(name: str, code: str = "pool_full") -> list[Record]:
    sent = Sent(at=1.0, call=name, attempt=0, path="/v1/completions", body={"prompt": [1], "max_tokens": 1})
    refusal = Refused(at=1.1, call=name, attempt=0, status=503, code=code, retry_after_s=1.0)
    return [sent, refusal, Closed(at=1.1, call=name, connection=0, error=None)]


def test_a_refusal_is_counted_and_is_no_loss() -> None:
    verdict = judge(good_history(good_call(), refused("c1")), decode)
    assert (verdict.refused, verdict.unaccepted, verdict.violations) == (1, 1, ())


def test_an_iteration_of_an_unknown_request_is_reported() -> None:
    ran = Ran(at=9.0, requests=("cmpl-c0.0", "cmpl-unknown.0", "cmpl-unknown.1"))
    history = good_history(good_call(), refused("c1"), [ran])
    assert rules(history) == ["refused_cost_nothing"]


def test_a_call_refused_without_the_pools_answer_may_have_run() -> None:
    ran = Ran(at=9.0, requests=("cmpl-unknown.0",))
    assert rules(good_history(good_call(), refused("c1", "pool_unavailable"), [ran])) == []


def test_as_many_unknown_requests_may_run_as_other_clients_made() -> None:
    ran = Ran(at=9.0, requests=("cmpl-unknown.0", "cmpl-stranger.0"))
    history = good_history(good_call(), refused("c1"), [ran])
    assert rules([*history, Strangers(at=8.0, calls=2)]) == []
    assert rules([*history, Strangers(at=8.0, calls=1)]) == ["refused_cost_nothing"]


def test_a_call_that_broke_before_its_headers_may_have_run() -> None:
    ran = Ran(at=9.0, requests=("cmpl-unknown.0",))
    history = good_history(good_call(), refused("c1"), [Closed(at=2.0, call="c1", connection=0, error="broken"), ran])
    assert rules(history) == []


def test_a_later_claim_with_no_higher_number_is_reported() -> None:
    again = Claimed(at=5.0, request="cmpl-c0.0", claim=1, logged=3)
    assert rules(good_history(good_call(), [again])) == ["claims_rise"]


def test_a_later_claim_of_a_shorter_log_is_reported() -> None:
    more = [
        Claimed(at=5.0, request="cmpl-c0.0", claim=3, logged=3),
        Claimed(at=6.0, request="cmpl-c0.0", claim=5, logged=2),
    ]
    assert rules(good_history(good_call(), more)) == ["claims_rise"]


def test_a_system_that_holds_more_than_before_is_reported_with_a_margin_for_files() -> None:
    before = Resources(at=0.5, moment="before", held={"open_files gateway": 20.0})
    kept = Resources(at=90.0, moment="after", held={"open_files gateway": 45.0, "keys log": 0.0})
    leaked = Resources(at=90.0, moment="after", held={"open_files gateway": 60.0, "keys log": 2.0})
    assert rules(good_history(good_call(), [before, kept])) == []
    verdict = judge(good_history(good_call(), [before, leaked]), decode)
    assert [found.rule for found in verdict.violations] == ["comes_to_rest", "comes_to_rest"]
    assert "keys log" in table(verdict)


def test_a_verdict_names_the_rules_without_evidence() -> None:
    assert judge(good_history(), None).unproven == (
        "equals_log",
        "equals_oracle",
        "claims_rise",
        "appends_in_order",
        "refused_cost_nothing",
        "comes_to_rest",
        "stale_work_is_refused",
        "steps_fit",
        "does_not_grow",
        "text_is_join",
    )


def test_a_system_that_ended_by_itself_is_reported_with_its_last_log_lines() -> None:
    [found] = judge(good_history(good_call(), [SystemEnded(at=9.0, words="no such file")]), decode).violations
    assert (found.rule, found.found) == ("system_stays", "no such file")


def test_faults_in_the_middle_of_an_answer_with_a_grammar_are_counted() -> None:
    calls = [good_call("c0"), good_call("c1", started=100.0)]
    first = next(record for record in calls[0] if isinstance(record, Sent))
    first.body["structured_outputs"] = {"choice": ["a"]}
    moments = [sorted(record.at for record in call if isinstance(record, Event)) for call in calls]
    # In the middle of the first call, after it, and in the middle of the second, which has no grammar.
    times = (moments[0][2], moments[0][-1] + 1, moments[1][2])
    faults = [
        Fault(at=at, number=number, kind="kill", targets=("redis",), pids=(1,), in_flight=("c0",))
        for number, at in enumerate(times)
    ]
    verdict = judge(good_history(*calls, faults))
    assert (verdict.faults, verdict.inside_grammars) == (3, 1)
    assert "1 faults in the middle of an answer with a grammar" in table(verdict)


def broke(reason: str) -> GroupNews:
    return GroupNews(at=5.0, group="worker-0.1", what="broke", epoch=3, reason=f"orca.core.domain.errors.{reason}")


def test_steps_that_do_not_fit_what_a_rank_holds_are_reported_once() -> None:
    misfits = [broke("EngineError: request 7 needs a KV block and none is free")] * 3
    [found] = judge(good_history(good_call(), misfits), decode).violations
    assert (found.rule, found.count) == ("steps_fit", 3)
    assert "epoch 3" in found.found


def test_links_and_epochs_that_break_are_no_misfits() -> None:
    others = [broke("EngineError: step 9 came after step 7"), broke("EngineError: rendezvous: this join was given up")]
    over = GroupNews(at=6.0, group="scheduler-0", what="over", epoch=3, reason="EngineError: request 7 is gone")
    assert rules(good_history(good_call(), [*others, over])) == []
