"""Prometheus metrics of a scheduler. The names follow common names of LLM servers, with our prefix.

Gauges are computed when they are scraped, so that a step costs only two counters and two histograms, and a little
more for each row of a prompt.
"""

import asyncio
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, FinishReason, Request
from orca.core.domain.step import Epoch, Part
from orca.core.metrics.renamed import MetricNames, VllmNames
from orca.core.metrics.vllm_names import Exporter
from orca.core.process.internal_port import Page
from orca.core.process.settings import DEFAULT_METRIC_NAMES
from orca.pool.records import CommitAnswer
from orca.scheduler.observer import IterationRecord, Observer, SchedulerLoad
from orca.scheduler.request_phases import RequestPhases

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_SLACK_SECONDS = (-80, -40, -20, -10, -5, -2.5, -1, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_CLAIM_SLACK = (
    "From the first claim of a request with a deadline to the end of its start window; below 0 the claim was too late."
    " Not known where claims go by arrival."
)
_SOURCE_TOKENS = "Source tokens in a step of an encoder-decoder model; 0 for a step without a source."
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


class PrefixCounters:
    """The counters of the prefix cache. Args: counter: makes a counter of a name and a text."""

    def __init__(self, counter: Callable[[str, str], Counter]) -> None:
        self._looked_up = counter(
            "orca_prefix_cache_queries", "Known tokens of requests that began, in a group with a prefix cache."
        )
        text = "Known tokens of requests that were found in the prefix cache and not computed."
        self._found = counter("orca_prefix_cache_hits", text)
        self._evicted = counter("orca_prefix_cache_evictions", "KV blocks that left the prefix cache for others.")

    def count(self, record: IterationRecord) -> None:
        """Count the requests that a step admitted, and the blocks that it evicted."""
        for admission in record.batch.admitted:
            self._looked_up.inc(len(admission.request.known))
            self._found.inc(admission.prefix_tokens)
        self._evicted.inc(record.evicted_blocks)


def _request_phases(histogram: Callable[[str, str, tuple[float, ...]], Histogram]) -> RequestPhases:
    """Return the times of the phases of requests. Args: histogram: makes one of a name, a text and its buckets."""
    return RequestPhases(
        prefill=histogram(
            "orca_request_prefill_time_seconds",
            "From the submit of a request's first step to its first token.",
            _SECONDS,
        ),
        decode=histogram("orca_request_decode_time_seconds", "From a request's first token to its last.", _SECONDS),
        inference=histogram(
            "orca_request_inference_time_seconds",
            "From the submit of a request's first step to its last token.",
            _SECONDS,
        ),
    )


class SchedulerMetrics(Observer):
    """One registry per scheduler, so that several can live in one process.

    Args:
        group: label of every metric.
        wall_ms: the wall clock, for the time in the queue.
        model_name: name by which clients call the model, for vLLM's names.
        names: see `metric_names_setting`.
        block_tokens: slots in a KV block.
        dtype: number format of the KV cache.
        has_prefix_cache: requests begin with KV blocks of others.
    """

    def __init__(
        self,
        group: str,
        wall_ms: Callable[[], int],
        *,
        model_name: str = "",
        names: Sequence[str] = DEFAULT_METRIC_NAMES,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        dtype: str = "float32",
        has_prefix_cache: bool = False,
    ) -> None:
        self.registry = CollectorRegistry()
        self._group = group
        self._wall_ms = wall_ms
        self._block_tokens = block_tokens
        self._dtype = dtype
        self._has_prefix_cache = has_prefix_cache
        vllm = VllmNames(self.registry, Exporter.SCHEDULER, model_name, lambda labels: labels["group"])
        self._names = MetricNames(self.registry, names, vllm)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["group"], registry=self.registry).labels(group)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["group"], buckets=buckets, registry=self.registry).labels(group)

        # The gateways count orca_prompt_tokens and orca_generation_tokens as clients see them; a scheduler counts the
        # work, which is more after a group died.
        self._prompt = counter(
            "orca_scheduler_prompt_tokens", "Tokens run in the initiation phase, with sources and repeats."
        )
        self._source = counter("orca_scheduler_source_tokens", "Tokens of sources run, repeats included.")
        self._target = counter("orca_scheduler_target_tokens", "Tokens of targets run, repeats included.")
        self._generated = counter("orca_scheduler_generation_tokens", "Tokens that came back from the stages.")
        self._prefixes = PrefixCounters(counter)
        self._success = Counter(
            "orca_scheduler_request_success",
            "Ends decided by this scheduler.",
            ["group", "finished_reason"],
            registry=self.registry,
        )
        answers = Counter(
            "orca_commit_answers",
            "The pool's answers to commits, one per request: a refused request has a claim that is over.",
            ["group", "answer"],
            registry=self.registry,
        )
        # Looked up once: there is an answer for each token.
        self._answers = {answer: answers.labels(group, answer.value) for answer in CommitAnswer}
        self._epochs = counter("orca_epochs", "Epochs formed.")
        self._broken = counter("orca_epochs_broken", "Epochs that ended before the scheduler was stopped.")
        self._failures = counter("orca_request_failures", "Requests blamed for an engine that failed from inside.")
        self._poisoned = counter("orca_requests_poisoned", "Requests ended because they break every group.")
        self._isolated = counter("orca_requests_isolated", "Claims that had to run alone because of earlier failures.")
        self._queue = histogram("orca_request_queue_time_seconds", "From submit to the first claim.", _SECONDS)
        self._slack = histogram("orca_request_claim_slack_seconds", _CLAIM_SLACK, _SLACK_SECONDS)
        self._tokens = histogram("orca_iteration_tokens", "Tokens in a step (selective batching).", _STEP_TOKENS)
        self._source_tokens = histogram("orca_iteration_source_tokens", _SOURCE_TOKENS, (0, *_STEP_TOKENS))
        self._size = histogram("orca_iteration_requests", "Requests in a step.", _STEP_TOKENS[:10])
        self._time = histogram("orca_iteration_seconds", "From submit to result of a step.", _STEP_SECONDS)
        self._phases = _request_phases(histogram)
        self._cache = Gauge(
            "orca_kv_cache_info",
            "1, with the sizes of the KV cache as labels; absent while the group is not formed.",
            ["group", "block_tokens", "blocks", "slots", "dtype"],
            registry=self.registry,
        )

    def watch(
        self,
        load: Callable[[], SchedulerLoad],
        *,
        unformed_s: Callable[[], float],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Add gauges: the load, the time for which the group has not been formed (formation_watch.py), and the tasks of
        the loop if there is one."""

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(name, text, ["group"], registry=self.registry).labels(self._group).set_function(value)

        gauge("orca_num_requests_running", "Requests that have slots and have not ended.", lambda: load().running)
        gauge("orca_num_requests_claimed", "Requests claimed that have not run yet.", lambda: load().claimed)
        gauge("orca_num_requests_waiting", "Requests queued in the pool, at the last claim.", lambda: load().waiting)
        gauge("orca_kv_cache_usage_perc", "Share of the slots that is reserved, 0 to 1.", lambda: _usage(load()))
        gauge("orca_kv_slots", "KV slots of the group; 0 while it is not formed.", lambda: load().slots)
        gauge("orca_prefix_cache_blocks", "KV blocks that only the prefix cache has.", lambda: load().cached_blocks)
        text = "KV blocks of requests, in a group with a prefix cache; each counts once, however many requests have it."
        gauge("orca_prefix_cache_blocks_in_use", text, lambda: load().held_blocks)
        gauge("orca_group_unformed_seconds", "Time that the group has not been formed; 0 while it is.", unformed_s)
        gauge("orca_requests_uncommitted", "Requests with tokens on their way to the pool.", lambda: load().uncommitted)

        if loop is not None:
            text = "Tasks of this process's event loop that have not ended."
            gauge("orca_asyncio_tasks", text, lambda: len(asyncio.all_tasks(loop)))

    def page(self) -> Page:
        """Return the page that a scrape reads."""
        return Page(self._names.page(), CONTENT_TYPE_LATEST)

    def formed(self, epoch: Epoch, slots: int, description: str) -> None:  # noqa: ARG002 - an observer's shape
        self._epochs.inc()
        self._cache.clear()
        self._cache.labels(self._group, self._block_tokens, slots // self._block_tokens, slots, self._dtype).set(1)

    def broke(self, epoch: Epoch, reason: str) -> None:
        self._broken.inc()
        self._cache.clear()
        self._phases.broke(epoch, reason)

    def claimed(self, request: Request, logged: int, slack_ms: int | None = None) -> None:
        if not logged:
            self._queue.observe(max(0, self._wall_ms() - request.submitted_ms) / 1e3)
        if slack_ms is not None and request.first_deadline_wall_ms is not None:
            self._slack.observe(slack_ms / 1e3)

    def isolated(self, request: Request) -> None:  # noqa: ARG002 - an observer's shape
        self._isolated.inc()

    def blamed(self, failed: Sequence[str], poisoned: Sequence[str]) -> None:
        self._failures.inc(len(failed) + len(poisoned))
        self._poisoned.inc(len(poisoned))

    def iterated(self, record: IterationRecord) -> None:
        self._phases.iterated(record)
        rows = record.batch.rows
        if not rows:
            return
        self._tokens.observe(record.tokens)
        self._size.observe(len(rows))
        self._time.observe((record.returned_ns - record.submitted_ns) / 1e9)
        source_tokens = record.batch.source_tokens
        self._prompt.inc(sum(row.count for row in rows if row.is_of_prompt) + source_tokens)
        if rows[0].request.part is Part.TARGET:
            self._source.inc(source_tokens)
            self._target.inc(record.tokens - source_tokens)
            self._source_tokens.observe(source_tokens)
        self._generated.inc(sum(row.sample for row in rows))
        if self._has_prefix_cache:
            self._prefixes.count(record)

    def ended(self, request: Request, reason: FinishReason, tokens: int) -> None:
        self._phases.ended(request, reason, tokens)
        self._success.labels(self._group, reason.value).inc()

    def answered(self, answers: Sequence[CommitAnswer]) -> None:
        for answer in set(answers):
            self._answers[answer].inc(answers.count(answer))


def _usage(load: SchedulerLoad) -> float:
    return load.slots_reserved / load.slots if load.slots else 0.0
