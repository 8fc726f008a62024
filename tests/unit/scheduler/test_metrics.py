"""The scheduler's metrics after known work."""

import asyncio
from dataclasses import replace

from orca.core.domain.engine import EngineShape
from orca.pool.records import CommitAnswer
from orca.scheduler.engines import virtual_time
from orca.scheduler.metrics import SchedulerMetrics
from orca.scheduler.observer import Observers, SchedulerLoad
from support.scheduler.scheduler_simulation import Simulation, a_request, by_index


def a_run_of_two_requests(metrics: SchedulerMetrics, *, prefix: int = 0) -> None:
    async def main() -> None:
        simulation = Simulation(tokens=by_index(bool), eos=(1,))
        group = simulation.add_group(EngineShape(stages=1, slots=64, block_tokens=4, max_model_len=64))
        simulation.start(group)
        await simulation.submit(a_request("A", prompt=5, new=9, prefix=prefix))
        await simulation.submit(a_request("B", prompt=3, new=1, prefix=prefix))
        await simulation.finish()
        for request in simulation.submitted.values():
            metrics.claimed(request, 0)
        for record in group.records:
            metrics.iterated(record)

    virtual_time.run(main())


def test_tokens_iterations_and_queue_time_are_counted() -> None:
    metrics = SchedulerMetrics("g0", wall_ms=lambda: 60_000)
    a_run_of_two_requests(metrics)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"group": "g0", **labels})

    # A runs its prompt of 5 and one increment to EOS, B its prompt of 3; the last step only frees.
    assert value("orca_scheduler_prompt_tokens_total") == 8
    assert value("orca_scheduler_generation_tokens_total") == 3
    assert value("orca_iteration_tokens_sum") == 9
    assert value("orca_iteration_seconds_count") == 2
    assert value("orca_request_queue_time_seconds_count") == 2
    assert value("orca_iteration_requests_bucket", le="1.0") == 1
    assert value("orca_scheduler_source_tokens_total") == value("orca_scheduler_target_tokens_total") == 0
    assert value("orca_iteration_source_tokens_count") == 0


def test_tokens_of_sources_and_targets_are_counted_separately() -> None:
    metrics = SchedulerMetrics("g0", wall_ms=lambda: 60_000)
    a_run_of_two_requests(metrics, prefix=2)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"group": "g0", **labels})

    # Sources of 5 and 3, two targets that begin with 2 tokens, and one increment of A.
    assert value("orca_scheduler_source_tokens_total") == 8
    assert value("orca_scheduler_target_tokens_total") == 5
    assert value("orca_scheduler_prompt_tokens_total") == 12
    assert value("orca_scheduler_generation_tokens_total") == 3
    assert value("orca_iteration_tokens_sum") == 13
    assert value("orca_iteration_requests_sum") == 3
    assert value("orca_iteration_source_tokens_sum") == 8
    assert value("orca_iteration_source_tokens_bucket", le="0.0") == 1


def test_answers_to_commits_are_counted_by_kind() -> None:
    metrics = SchedulerMetrics("g0", wall_ms=lambda: 0)
    Observers((metrics,)).answered([CommitAnswer.APPLIED, CommitAnswer.NOT_YOURS, CommitAnswer.APPLIED])
    found = {
        answer: metrics.registry.get_sample_value("orca_commit_answers_total", {"group": "g0", "answer": answer})
        for answer in ("applied", "not yours")
    }
    assert found == {"applied": 2, "not yours": 1}


async def test_the_tasks_of_the_loop_are_shown() -> None:
    metrics = SchedulerMetrics("g0", wall_ms=lambda: 0)
    metrics.watch(lambda: SchedulerLoad(), unformed_s=lambda: 0.0, loop=asyncio.get_running_loop())
    tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(3)]
    assert metrics.registry.get_sample_value("orca_asyncio_tasks", {"group": "g0"}) == 1 + len(tasks)
    for task in tasks:
        task.cancel()


def test_failures_poison_and_requests_that_run_alone_are_counted() -> None:
    metrics = SchedulerMetrics("g0", wall_ms=lambda: 0)
    metrics.blamed(["A.0", "B.0"], [])
    metrics.isolated(a_request("B"))
    metrics.blamed([], ["B.0"])
    names = ("orca_request_failures_total", "orca_requests_poisoned_total", "orca_requests_isolated_total")
    values = [metrics.registry.get_sample_value(name, {"group": "g0"}) for name in names]
    assert values == [3, 1, 1]


def test_the_load_is_read_at_each_scrape() -> None:
    metrics = SchedulerMetrics("g0", wall_ms=lambda: 0)
    load = SchedulerLoad(running=3, waiting=7, slots=64, slots_reserved=16)
    metrics.watch(lambda: load, unformed_s=lambda: 0.0)
    page = metrics.page()
    text = page.body.decode()
    assert page.content_type.startswith("text/plain; version=")
    assert 'orca_num_requests_running{group="g0"} 3.0' in text
    assert 'orca_num_requests_waiting{group="g0"} 7.0' in text
    assert 'orca_kv_cache_usage_perc{group="g0"} 0.25' in text


def test_an_unformed_group_uses_nothing_and_reports_its_age() -> None:
    metrics = SchedulerMetrics("g0", wall_ms=lambda: 0)
    metrics.watch(SchedulerLoad, unformed_s=lambda: 12.5)
    values = [
        metrics.registry.get_sample_value(name, {"group": "g0"})
        for name in ("orca_kv_cache_usage_perc", "orca_group_unformed_seconds")
    ]
    assert values == [0, 12.5]


def test_the_slack_of_first_claims_is_that_of_requests_with_a_deadline() -> None:
    metrics = SchedulerMetrics("g0", wall_ms=lambda: 0)
    due = replace(a_request("A"), deadline_ms=1000)
    for request, slack_ms in ((due, 700), (due, -300), (due, 0), (due, None), (a_request("B"), 900)):
        Observers((metrics,)).claimed(request, 0, slack_ms)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"orca_request_claim_slack_seconds_{name}", {"group": "g0", **labels})

    # The format has no sum of values that may be negative.
    assert (value("count"), value("sum")) == (3, None)
    assert [value("bucket", le=bound) for bound in ("-0.5", "-0.25", "0.0", "0.5", "1.0")] == [0, 1, 2, 2, 3]
