"""The times of prefill and decode, from steps with known times."""

from prometheus_client import CollectorRegistry, Histogram

from orca.core.domain.engine import EngineShape
from orca.core.domain.request import FinishReason, Request
from orca.core.domain.step import Claim, Epoch
from orca.scheduler.engines import virtual_time
from orca.scheduler.metrics import SchedulerMetrics
from orca.scheduler.observer import IterationRecord, Observer
from orca.scheduler.policy.batch import Batch, BatchRow, GroupRequest
from orca.scheduler.request_phases import RequestPhases
from support.scheduler.scheduler_simulation import Simulation, a_request, by_index

EPOCH = Epoch(number=1, holder="s")
S = 1_000_000_000


class Phases:
    """The observer under test, with what it observed."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        names = ("prefill", "decode", "inference")
        self.observer = RequestPhases(**{name: Histogram(name, "t", registry=self._registry) for name in names})

    def seen(self) -> tuple[float | None, ...]:
        """Return how many requests were observed, then the sums of prefill, decode and inference."""
        names = ("prefill_count", "prefill_sum", "decode_sum", "inference_sum")
        return tuple(self._registry.get_sample_value(name) for name in names)

    def step(self, *rows: BatchRow, submitted_s: int, returned_s: int, freed: tuple[GroupRequest, ...] = ()) -> None:
        batch = Batch(rows=rows, freed=freed)
        self.observer.iterated(
            IterationRecord(epoch=EPOCH, step=1, batch=batch, submitted_ns=submitted_s * S, returned_ns=returned_s * S)
        )

    def end(self, entry: GroupRequest) -> None:
        self.observer.ended(entry.request, FinishReason.LENGTH, 1)


def claimed(request: Request, log: tuple[int, ...] = ()) -> GroupRequest:
    known = (*request.prompt, *log)
    return GroupRequest(
        request=request, claim=Claim(1, "s/1"), known=known, sampled=len(log), received=len(log), last_token=0
    )


def prompt_row(entry: GroupRequest, *, start: int = 0, count: int = 5, sample: bool = True) -> BatchRow:
    return BatchRow(entry, start, count, sample)


def increment(entry: GroupRequest) -> BatchRow:
    return BatchRow(entry, len(entry.known), 1, True)


def test_prefill_lasts_from_the_first_chunk_to_the_first_token_and_decode_to_the_last() -> None:
    phases, entry = Phases(), claimed(a_request("A", prompt=5))
    phases.step(prompt_row(entry, count=3, sample=False), submitted_s=10, returned_s=11)
    phases.step(prompt_row(entry, start=3, count=2), submitted_s=11, returned_s=13)
    phases.step(increment(entry), submitted_s=13, returned_s=14)
    assert phases.seen() == (0, 0, 0, 0)
    phases.end(entry)
    phases.step(increment(entry), submitted_s=14, returned_s=18)
    assert phases.seen() == (1, 3, 5, 8)


def test_a_request_of_one_token_has_no_decode() -> None:
    phases, entry = Phases(), claimed(a_request("A", prompt=5))
    phases.end(entry)
    phases.step(prompt_row(entry), submitted_s=1, returned_s=3)
    assert phases.seen() == (1, 2, 0, 2)


def test_a_request_that_brings_tokens_of_an_earlier_claim_is_left_out() -> None:
    phases, entry = Phases(), claimed(a_request("A", prompt=5), log=(7, 8))
    phases.step(prompt_row(entry, count=7), submitted_s=1, returned_s=3)
    phases.end(entry)
    phases.step(increment(entry), submitted_s=3, returned_s=4)
    assert phases.seen() == (0, 0, 0, 0)


def test_times_of_a_lost_epoch_and_of_freed_requests_are_forgotten() -> None:
    phases, lost, freed = Phases(), claimed(a_request("A", prompt=5)), claimed(a_request("B", prompt=5))
    phases.step(prompt_row(lost), submitted_s=1, returned_s=2)
    phases.observer.broke(EPOCH, "")
    phases.step(prompt_row(freed), submitted_s=3, returned_s=4)
    phases.step(submitted_s=4, returned_s=5, freed=(freed,))
    phases.end(lost)
    phases.end(freed)
    phases.step(submitted_s=5, returned_s=6)
    assert phases.seen() == (0, 0, 0, 0)
    assert not phases.observer._times


def test_each_request_of_a_run_is_observed_once() -> None:
    metrics = SchedulerMetrics("g0", wall_ms=lambda: 0)

    async def main() -> None:
        simulation = Simulation(tokens=by_index(bool), eos=(1,))
        group = simulation.add_group(EngineShape(stages=1, slots=64, block_tokens=4, max_model_len=64))
        simulation.start(group)
        for name in "ABC":
            await simulation.submit(a_request(name, prompt=5, new=9))
        await simulation.finish()
        for record in group.records:
            metrics.iterated(record)
            for entry in {row.request.request.id: row.request for row in record.batch.rows if row.sample}.values():
                metrics.ended(entry.request, FinishReason.LENGTH, 1)

    virtual_time.run(main())
    assert isinstance(metrics, Observer)
    count = metrics.registry.get_sample_value("orca_request_inference_time_seconds_count", {"group": "g0"})
    assert count == 3
