"""Hit rates of the prefix cache on a trace, counted by hand: the real scheduler on simulated stages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orca.bench.turns.hit_rate import HitRate, HitRatePlan, figures, lines, measure_hit_rates, to_json
from orca.bench.turns.shared_trace import SharedTrace, read_shared_trace
from orca.core.domain.errors import SettingError
from orca.planner.simulate.simulated_run import Simulation

SECOND = 1_000


def a_trace(folder: Path, *prompts: Sequence[int], every_ms: int = 10 * SECOND, output: int = 16) -> SharedTrace:
    """Return a trace of prompts, given by their ids. A block has 32 tokens: two KV blocks."""
    rows = [
        {"timestamp": number * every_ms, "input_length": 512 * len(ids), "output_length": output, "hash_ids": ids}
        for number, ids in enumerate(prompts)
    ]
    (file := folder / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read_shared_trace(file, divisor=16)


def measure(trace: SharedTrace, **changes: Any) -> list[HitRate]:
    said: list[str] = []
    return measure_hit_rates(HitRatePlan(trace=trace, **changes), said.append)


CONVERSATIONS = ([1, 2], [1, 2, 3], [7], [1, 2, 3, 4], [7, 8])


def test_a_large_cache_finds_what_any_cache_can(tmp_path: Path) -> None:
    [found] = measure(a_trace(tmp_path, *CONVERSATIONS), groups=(1,), shares=(2.0,))
    assert (found.looked_up, found.found) == (12 * 32, (0 + 2 + 0 + 3 + 1) * 32)
    assert found.rate == found.most == 0.5
    assert (found.requests, found.evicted) == ([5], 0)


def test_a_small_cache_finds_what_was_used_last(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, [1, 2], [1, 3], [5, 6], [1, 2], [1, 4])
    # A group has the five KV blocks of one request, which uses four of them: its answer has one token. So the prompt
    # [5, 6] leaves only the first half of block 1.
    [found] = measure(trace, groups=(1,), shares=(0.01,))
    assert found.slots == 64 + 16
    assert found.found == 0 + 32 + 0 + 16 + 32
    assert found.evicted == 0 + 1 + 4 + 3 + 2


def test_each_of_two_groups_has_a_cache_of_its_own(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *[[1, 2, 3]] * 40)
    one, two = measure(trace, groups=(1, 2), shares=(10.0,))
    # All but the last KV block is found again, whose last token is computed: 80 of 96 tokens.
    assert one.found == 39 * 80
    assert two.found == 38 * 80, "each group computed the prompt once"
    assert sum(two.requests) == 40
    assert min(two.requests) >= 10, "chance gave nearly all requests to one group"


def test_busy_groups_share_the_requests_that_come_at_once(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *[[number] for number in range(30)], every_ms=0)
    [found] = measure(trace, groups=(2,), shares=(1.0,), max_batch_size=2)
    assert found.found == 0
    assert min(found.requests) >= 10


def test_a_run_is_the_same_again(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *CONVERSATIONS, every_ms=10)
    assert measure(trace, shares=(0.5,)) == measure(trace, shares=(0.5,))


def test_time_in_which_stages_compute_is_a_share_of_all_groups(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, [1], [2], output=16)
    one, two = measure(trace, shares=(1.0,))
    assert one.busy == pytest.approx(2 * (2_000 + 32 * 250) / (10 * 1e6 + 2_000 + 32 * 250), rel=0.01)
    assert two.busy == pytest.approx(one.busy / 2, rel=0.01)
    [slower] = measure(trace, groups=(1,), shares=(1.0,), time_factor=2.0)
    assert slower.busy == pytest.approx(one.busy / 2, rel=0.01)


def test_results_are_shown_in_three_forms(tmp_path: Path) -> None:
    found = measure(a_trace(tmp_path, *[[1, 2]] * 8), groups=(1, 2), shares=(4.0,))
    one, two = found
    head, *rows, last = lines(found)
    assert head.split()[:2] == ["slots", "of"]
    assert rows[0].split()[2:5] == ["1", f"{100 * one.rate:.1f}", "-"]
    assert rows[1].split()[2:5] == ["2", f"{100 * two.rate:.1f}", f"{two.rate / one.rate:.2f}"]
    assert last == f"one cache without bound would find {100 * one.most:.1f} %"
    assert [each["rate"] for each in to_json(found)] == [one.rate, two.rate]
    shown = {(each.what, each.settings.get("groups")): each for each in figures(found, {"trace": "t"})}
    assert shown["Prompt tokens found in the prefix cache", 1].value == pytest.approx(100 * one.rate, rel=1e-3)
    assert shown["Hit rate against one group", 2].value == pytest.approx(two.rate / one.rate, rel=1e-3)
    assert ("Hit rate against one group", 1) not in shown
    assert {each.settings["trace"] for each in shown.values()} == {"t"}


def test_progress_names_each_run(tmp_path: Path) -> None:
    said: list[str] = []
    measure_hit_rates(HitRatePlan(trace=a_trace(tmp_path, [1], [1]), shares=(1.0,)), said.append)
    assert [each.partition(",")[0] for each in said] == ["1 group", "2 groups"]


def test_request_level_scheduling_shares_no_prefixes(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, [1]).trace(1.0)
    plan = HitRatePlan(trace=a_trace(tmp_path, [1]))
    simulation = Simulation(shape=plan.shape(trace, 1.0), cost=plan.cost, prefix_cache=True)
    with pytest.raises(SettingError, match="request_level share no prefixes"):
        simulation.run("request_level", 1, trace)
