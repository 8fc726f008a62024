"""Calls and faults are drawn from a seed: the same again, and of every shape."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile

from checker.clients.workload import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    CHAT,
    PlannedCall,
    chain,
    english,
    plan_calls,
    with_shared_prefixes,
)
from checker.faults.injector import ROLES, plan_faults
from checker.history.answers import requested_choices
from checker.oracles.expectations import cut_at_stop


def calls(seed: int = 7, *, drops: bool = True) -> list[PlannedCall]:
    return plan_calls(english("m"), seed=seed, count=400, rate=2.0, max_tokens=(5, 50), drops=drops)


def test_the_same_seed_plans_the_same_calls_and_another_others() -> None:
    assert calls() == calls()
    assert calls() != calls(8)


def test_all_shapes_of_calls_occur() -> None:
    plans = calls()
    assert {plan.intent for plan in plans} == {"finish", "cancel", "deadline"}
    bodies = [plan.body for plan in plans]
    assert {bool(body.get("stream")) for body in bodies} == {True, False}
    assert {requested_choices(body) for body in bodies} >= {1, 2, 3, 4}
    assert any("stop" in body for body in bodies)
    assert any(plan.path == CHAT for plan in plans)
    assert any(plan.drop_after for plan in plans)
    assert not any(plan.drop_after for plan in calls(drops=False))


def test_a_share_of_the_calls_has_a_deadline() -> None:
    plans = plan_calls(english("m"), seed=1, count=400, rate=2.0, max_tokens=(5, 50), drops=True, deadlines=0.5)
    assert 160 < sum("deadline_ms" in plan.body for plan in plans) < 240
    assert {plan.intent for plan in plans} == {"finish", "cancel", "deadline"}


def test_calls_come_at_their_rate_and_to_a_chain_without_chat() -> None:
    plans = plan_calls(chain("m", 50), seed=1, count=400, rate=4.0, max_tokens=(1, 5), drops=False)
    assert 60 < plans[-1].due_s < 160
    assert not any(plan.path == CHAT for plan in plans)


def test_every_role_is_chosen_before_one_is_chosen_twice() -> None:
    faults = plan_faults(seed=3, kills=50, roles=ROLES, freezes=True, tokens_between=10)
    for start in range(0, 50, len(ROLES)):
        firsts = [fault.roles[0] for fault in faults[start : start + len(ROLES)] if fault.roles != ("all",)]
        assert max(Counter(firsts).values()) == 1
    assert faults == plan_faults(seed=3, kills=50, roles=ROLES, freezes=True, tokens_between=10)
    assert {fault.kind for fault in faults} == {"kill", "freeze"}
    assert {len(fault.roles) for fault in faults} == {1, 2}


def test_a_server_that_cannot_resume_is_never_killed_completely() -> None:
    faults = plan_faults(seed=3, kills=200, roles=ROLES[1:], freezes=False, tokens_between=10)
    assert {fault.kind for fault in faults} == {"kill"}
    assert not any({"all", "gateway"} & set(fault.roles) for fault in faults)


def test_expected_tokens_end_with_the_one_that_completes_a_stop_string() -> None:
    assert cut_at_stop([7, 8, 9], ["<8>"]) == ([7, 8], True)
    assert cut_at_stop([7, 8, 9], [">", "<8>"]) == ([7], True)
    assert cut_at_stop([7, 8, 9], ["<1>"]) == ([7, 8, 9], False)


def shared_plans(answer: Callable[[Sequence[int]], Sequence[int]] | None = None) -> list[PlannedCall]:
    source = with_shared_prefixes(chain("m", 1000), seed=7, answer=answer)
    return plan_calls(source, seed=7, count=200, rate=2.0, max_tokens=(5, 50), drops=True)


def test_prompts_share_their_beginnings_up_to_each_side_of_a_border_of_blocks() -> None:
    prompts = [plan.body["prompt"] for plan in shared_plans() if isinstance(plan.body["prompt"], list)]
    longest = [
        max((_common(prompt, other) for other in prompts if other is not prompt), default=0) for prompt in prompts
    ]
    shared = [count for count in longest if count >= BLOCK_TOKENS - 1]
    assert len(shared) > len(prompts) / 2
    assert {count % BLOCK_TOKENS for count in shared} >= {0, 1, BLOCK_TOKENS - 1}
    assert max(shared) > 4 * BLOCK_TOKENS
    assert shared_plans() == shared_plans()


def test_prompts_go_on_with_the_answers_of_the_model() -> None:
    assert any(map(_repeats_a_token, shared_plans(answer=lambda prompt: [len(prompt)] * ANSWER_TOKENS)))
    assert not any(map(_repeats_a_token, shared_plans()))


def _repeats_a_token(plan: PlannedCall) -> bool:
    prompt = plan.body["prompt"]
    return isinstance(prompt, list) and len(prompt) > 70 and len(set(map(str, prompt[65:70]))) == 1


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of first elements that are equal."""
    same = (a == b for a, b in zip(one, other, strict=False))
    return sum(takewhile(bool, same))
