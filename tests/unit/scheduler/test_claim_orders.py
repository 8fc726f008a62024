"""The order of each claim: rules, room for prompts, and the outputs that the pool has counted."""

import logging
from dataclasses import replace

import pytest

from orca.core.domain.errors import SettingError
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Claim
from orca.pool.length_bins import bin_of
from orca.pool.order.order_class import (
    DeadlineKind,
    OrderClass,
    class_named,
    class_of,
    length_class,
    middle_of,
    whole_priority,
)
from orca.pool.order.order_rules import ClaimOrder, Drop, Order, OrderRules, RunEstimates, Utility
from orca.pool.records import ClaimAnswer, LengthCounts, PeriodLengths
from orca.scheduler.order.claim_orders import ANSWERS_MIN, ClaimOrders, mean_outputs
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import WHOLE_PROMPTS_ROOM, PromptRoom
from orca.scheduler.policy.state import GroupState
from orca.scheduler.settings import parse_settings
from support.scheduler.scheduler_simulation import a_request, some_limits

NEEDED = ["--model", "m", "--stages", "h:1"]


def counted(prompt: int, outputs: dict[int, int]) -> LengthCounts:
    cells = {(bin_of(prompt), bin_of(output)): count for output, count in outputs.items()}
    return LengthCounts(periods=(PeriodLengths(age_ms=0, cells=cells, cut=0),))


def an_order(estimates: RunEstimates, **rules: object) -> ClaimOrder:
    return ClaimOrder(
        rules=OrderRules(**rules),  # type: ignore[arg-type]
        estimates=estimates,
        free_prompt_tokens=1,
        total_prompt_tokens=1,
    )


def test_length_classes_have_two_ranges_per_octave() -> None:
    numbers = [length_class(tokens) for tokens in range(1, 17)]
    assert numbers == [0, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 8]
    for tokens in range(1, 5000):
        assert abs(middle_of(length_class(tokens)) - tokens) <= tokens / 3


def test_a_weight_is_a_whole_priority_within_its_range() -> None:
    weights = (None, 1.0, 2.0, 0.25, 2.0**20, 2.0**-20)
    assert [whole_priority(replace(a_request(), weight=weight)) for weight in weights] == [0, 0, -1, 2, -8, 8]


def test_mean_outputs_are_those_of_classes_with_enough_answers() -> None:
    assert mean_outputs(counted(20, {4: ANSWERS_MIN - 1})) == ()
    ((number, mean),) = mean_outputs(counted(20, {4: 30, 10: 10}))
    assert (number, mean) == (length_class(20), pytest.approx(5.5))


def test_expected_tokens_are_at_most_what_the_request_may_have() -> None:
    seen = RunEstimates(outputs=((6, 20.0),))
    assert seen.expected_tokens(OrderClass(0, 6, 12, DeadlineKind.END)) == 20.0
    assert seen.expected_tokens(OrderClass(0, 6, 2, DeadlineKind.END)) == 2.0
    assert seen.expected_tokens(OrderClass(0, 7, 2, DeadlineKind.END)) == 2.0, "nothing was counted for such prompts"


def test_own_time_reaches_to_what_the_deadline_asks_for() -> None:
    known = RunEstimates(prompt_token_ms=2.0, step_ms=10.0)
    own = [known.own_ms(OrderClass(0, 4, 6, kind)) for kind in DeadlineKind]
    assert own == [2.0 * 5 + 10.0 * 9.5, 2.0 * 5 + 10.0, 0.0], "of the longest prompt of the class"
    expected = [known.expected_ms(OrderClass(0, 4, 6, kind)) for kind in DeadlineKind]
    assert expected == [2.0 * 4.5 + 10.0 * 9.5, 2.0 * 4.5 + 10.0, 0.0]


def test_a_goal_for_the_first_token_makes_classes_of_its_own() -> None:
    goals = (None, 1, 2, 1_000, 1_023, 1_024, 1_535, 1_536, 2**31)
    found = [class_of(replace(a_request(), first_token_goal_ms=ms), DeadlineKind.NONE).goal for ms in goals]
    assert found == [0, 1, 2, 19, 19, 20, 20, 21, 62], "1.5 x 2^9 is 768, the bound of class 19"
    request = replace(a_request(), first_token_goal_ms=1_000)
    assert class_of(request, DeadlineKind.NONE, logged=1).goal == 0, "it has its first token"
    assert [class_of(request, kind).goal for kind in (DeadlineKind.END, DeadlineKind.FIRST_TOKEN)] == [0, 0]


def test_a_class_has_the_name_that_it_is_found_by() -> None:
    for kind in DeadlineKind:
        of = OrderClass(-2, 4, 7, kind, 3)
        assert (str(of), class_named(str(of))) == (f"-2/4/7/3/{kind.value}", of)
    with_goal = OrderClass(8, 4, 7, DeadlineKind.NONE, 0, 20)
    assert (str(with_goal), class_named(str(with_goal))) == ("8/4/7/0/none/20", with_goal)


@pytest.mark.parametrize("name", ["", "0/4/7/0", "0/4/7/0/soon", "0/4/7/0/none/", "0/4/7/0/none/20/1", "a/4/7/0/end"])
def test_a_name_of_another_release_is_no_class(name: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        class_named(name)


@pytest.mark.parametrize(
    ("goal", "window_ms"),
    [
        (0, 30_000.0),
        (20, 1_024.0 - 20.0),  # own time: five prompt tokens of 2 ms, and one step
        (5, 6.0 - 20.0),
        (29, 24_576.0 - 20.0),
        (30, 30_000.0),
    ],
    ids=["none", "goal", "too short", "long", "longer than patience"],
)
def test_the_window_of_a_class_without_a_deadline_ends_with_its_goal_or_its_patience(
    goal: int, window_ms: float
) -> None:
    order = an_order(RunEstimates(prompt_token_ms=2.0, step_ms=10.0))
    assert order.window_ms(OrderClass(0, 4, 6, DeadlineKind.NONE, 0, goal)) == window_ms


def test_an_output_that_nothing_can_end_sooner_has_a_known_length() -> None:
    seen = RunEstimates(step_ms=10.0, outputs=((4, 3.0),))
    fixed, free = (OrderClass(0, 4, 6, DeadlineKind.END, fewest) for fewest in (6, 0))
    assert (seen.expected_tokens(free), seen.own_ms(free)) == (3.0, 30.0)
    assert (seen.expected_tokens(fixed), seen.expected_ms(fixed)) == (9.5, 95.0)
    assert seen.own_ms(fixed) == 110.0, "of the longest output of the class"


@pytest.mark.parametrize(
    ("sampling", "fewest"),
    [
        (SamplingParams(), 1),
        (SamplingParams(min_tokens=9), 9),
        (SamplingParams(ignore_eos=True), 20),
        (SamplingParams(ignore_eos=True, stop=("end",)), 1),
    ],
)
def test_the_class_of_a_request_has_its_fewest_tokens(sampling: SamplingParams, fewest: int) -> None:
    request = replace(a_request(new=20), sampling=sampling)
    assert class_of(request, DeadlineKind.NONE).fewest == length_class(fewest)


def test_prompts_that_cost_little_do_not_make_a_request_long() -> None:
    prompt, output = OrderClass(0, 12, 4, DeadlineKind.END), OrderClass(0, 4, 10, DeadlineKind.END)
    alike, cheap = an_order(RunEstimates()), an_order(RunEstimates(prompt_cost=0.05))
    assert alike.density(prompt) < alike.density(output)
    assert cheap.density(prompt) > cheap.density(output)


def test_a_heavy_request_does_not_keep_out_light_ones_that_cost_less() -> None:
    order = an_order(RunEstimates())
    heavy, light = OrderClass(-3, 16, 16, DeadlineKind.END), OrderClass(0, 4, 4, DeadlineKind.END)
    assert order.utility(heavy) == 8 * order.utility(light)
    assert order.density(heavy) < order.density(light)


def test_inverse_length_is_the_utility_of_the_paper() -> None:
    order = an_order(RunEstimates(), utility=Utility.INVERSE_LENGTH)
    of = OrderClass(0, 4, 4, DeadlineKind.END)
    assert order.utility(of) == pytest.approx(1 / 9.0)


def test_prompts_that_are_claimed_take_room_until_they_run() -> None:
    policy, state = IterationPolicy(), GroupState()
    limits = some_limits(max_batch_tokens=100)
    state.add(a_request("A", prompt=30, arrival=1), Claim(1, "c"))
    assert policy.prompt_room(state, limits) == PromptRoom(70, 100)
    state.add(a_request("B", prompt=500, arrival=2), Claim(1, "c"))
    assert policy.prompt_room(state, limits).free == -30, "a prompt that is longer than a step takes all of it"
    assert policy.prompt_room(GroupState(), some_limits()) == PromptRoom(WHOLE_PROMPTS_ROOM, WHOLE_PROMPTS_ROOM)


def test_the_log_says_once_that_an_older_schema_is_in_force(caplog: pytest.LogCaptureFixture) -> None:
    orders = ClaimOrders(OrderRules())
    with caplog.at_level(logging.INFO):
        for is_by_order in (True, False, False, True):
            orders.note(ClaimAnswer(claimed=(), waiting=0, is_blocked=False, is_by_order=is_by_order))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "older schema number" in caplog.records[0].message


def test_settings_of_an_order_become_its_rules() -> None:
    assert parse_settings(NEEDED, {}).make_rules() is None
    assert parse_settings([*NEEDED, "--order", "deadline"], {}).make_rules() == OrderRules()
    flags = [
        "--order",
        "deadline",
        "--utility",
        "inverse_length",
        "--eta-percent",
        "25",
        "--patience-s",
        "5",
        "--drop",
        "never",
    ]
    assert parse_settings([*NEEDED, *flags], {}).make_rules() == OrderRules(
        order=Order.DEADLINE, utility=Utility.INVERSE_LENGTH, eta=0.25, patience_ms=5000, drop=Drop.NEVER
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--order", "best"], "--order: 'best' is not one of arrival, deadline, edf, sjf"),
        (["--utility", "equal"], "--utility: 'equal' is not for this order"),
        (["--patience-s", "9"], "--patience-s: 9 is not for this order"),
        (["--drop", "never"], "--drop: 'never' is not for this order"),
        (["--eta-percent", "50"], "--eta-percent: 50 is not for this order"),
        (["--order", "edf", "--eta-percent", "50"], "--eta-percent: 50 is not for this order"),
        (["--order", "deadline", "--eta-percent", "0"], "--eta-percent: 0 is not 1 or more"),
        (["--order", "edf", "--patience-s", "2147483648"], "--patience-s: 2147483648 is not 2147483647 or less"),
        (["--order", "deadline", "--eta-percent", "100"], "--eta-percent: 100 is not 99 or less"),
        (["--order", "deadline", "--patience-s", "0"], "--patience-s: 0 is not 1 or more"),
        (["--order", "deadline", "--drop", "all"], "--drop: 'all' is not one of"),
        (["--order", "deadline", "--utility", "all"], "--utility: 'all' is not one of"),
    ],
)
def test_a_mistake_in_an_order_is_named(flags: list[str], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        parse_settings([*NEEDED, *flags], {})


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"order": Order.ARRIVAL}, "order arrival has no rules"),
        ({"eta": 0.0}, "eta must be above 0 and below 1, not 0"),
        ({"eta": 1.0}, "eta must be above 0 and below 1, not 1"),
        ({"patience_ms": 999}, "patience must be 1 to 2147483647 seconds, not 0.999"),
        ({"patience_ms": 2**31 * 1000}, "patience must be 1 to 2147483647 seconds, not 2.14748e"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, object], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        OrderRules(**rules)  # type: ignore[arg-type]
