"""Prometheus metrics of a gateway. Names follow those in common use for LLM servers, with our prefix."""

import itertools
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from orca.core.domain.request import FinishReason
from orca.core.metrics.renamed import MetricNames, VllmNames
from orca.core.metrics.vllm_names import Exporter
from orca.core.process.settings import DEFAULT_METRIC_NAMES
from orca.gateway.latency_goals import Goal, GoalOutcome
from orca.pool.order.deadline_outcome import DeadlineOutcome
from orca.pool.records import PoolStats

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_CHOICES = (1, 2, 5, 10, 20, 50, 100)

REFUSED = "refused"
"""The outcome of a deadline that could not be met when the call came, beside those of DeadlineOutcome."""

ENGINE = "0"
"""vLLM's label `engine` of a gateway's metrics. Behind one address clients see one engine."""

_POOL_GAUGES = {
    "up": "1 when the pool answers.",
    "requests_waiting": "Requests queued in the pool, from all gateways.",
    "requests_waiting_max": "Most requests that may wait; further ones are refused.",
    "requests_running": "Requests owned by a group.",
    "requests_ended": "Records of ended requests that are kept for their retention time.",
    "oldest_wait_seconds": "Age of the oldest waiting request.",
    "reserved_bytes": "Bytes reserved for accepted requests.",
    "reserved_bytes_max": "Most bytes that may be reserved; further requests are refused.",
    "groups": "Groups whose scheduler holds a seat.",
    "groups_formed": "Groups that serve; with 0 no request is computed.",
}


class GatewayMetrics:
    """The metrics of one application. Each has its own registry, so that several can exist in one process."""

    def __init__(self, model: str, names: Sequence[str] = DEFAULT_METRIC_NAMES) -> None:
        """Args: model: name by which clients call it; names: see `metric_names_setting`."""
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
            return metric.labels(model)

        self.time_to_first_token = histogram(
            "orca_time_to_first_token_seconds", "Time from a call to its first token.", _SECONDS
        )
        self.inter_token_latency = histogram(
            "orca_inter_token_latency_seconds", "Time between two tokens of a choice, as they are sent.", _TOKEN_SECONDS
        )
        self.e2e_latency = histogram("orca_e2e_request_latency_seconds", "Time from a call to its end.", _SECONDS)
        self.prompt_tokens = histogram("orca_request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_tokens = histogram("orca_request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self.time_per_output_token = histogram(
            "orca_request_time_per_output_token_seconds",
            "Mean time between two tokens of a request of at least two tokens, as they are sent.",
            _TOKEN_SECONDS,
        )
        self.max_generation_tokens = histogram(
            "orca_request_max_num_generation_tokens",
            "Generated tokens of the longest of a prompt's n choices.",
            _TOKENS,
        )
        self.params_n = histogram("orca_request_params_n", "Choices that a call wants for each prompt (n).", _CHOICES)
        self.params_max_tokens = histogram(
            "orca_request_params_max_tokens", "Most tokens that a request may generate (max_tokens).", _TOKENS
        )

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=self.registry)

        self.prompt_tokens_total = counter(
            "orca_prompt_tokens",
            "Prompt tokens of accepted requests. A prompt counts once for each of its n choices, which compute it each;"
            " the usage of an answer counts it once. A repeated call counts each time.",
            "model_name",
        ).labels(model)
        self.generation_tokens_total = counter(
            "orca_generation_tokens", "Generated tokens delivered.", "model_name"
        ).labels(model)
        self.source_tokens_total = counter(
            "orca_source_tokens",
            "Source tokens of accepted requests of an encoder-decoder model; they are part of the prompt tokens.",
            "model_name",
        ).labels(model)
        self.target_tokens_total = counter(
            "orca_target_tokens",
            "Target tokens of an encoder-decoder model: how the targets of accepted requests begin, and the generated"
            " tokens delivered.",
            "model_name",
        ).labels(model)
        self._success = counter(
            "orca_request_success",
            "Requests that ended, for any reason, including deadline_exceeded and error.",
            "model_name",
            "finished_reason",
        )
        for reason in FinishReason:
            # Created at the start, so that a rate shows the first end.
            self._success.labels(model, reason)
        self._goals = counter(
            "orca_request_slo",
            "Requests that met or missed a latency goal of their call.",
            *("model_name", "goal", "outcome"),
        )
        for goal, outcome in itertools.product(Goal, GoalOutcome):
            # Created at the start, so that a rate shows the first miss.
            self._goals.labels(model, goal, outcome)
        self._deadlines = counter(
            "orca_request_deadlines",
            "Requests that had a deadline, by its outcome; goodput is the rate of in_time. Requests without a deadline,"
            " cancelled and failed ones count in none. The outcome refused counts calls.",
            *("model_name", "outcome"),
        )
        for name in (*DeadlineOutcome, REFUSED):
            # Created at the start, so that a rate shows the first one.
            self._deadlines.labels(model, name)
        self._utility = counter(
            "orca_request_utility",
            "Weights of the requests that were in time, 2^-priority each. Requests without a deadline count nothing.",
            "model_name",
        ).labels(model)
        self._http = counter(
            "orca_http_requests",
            "Answered HTTP requests. Those refused before method and route were known have `none` for both.",
            *("method", "route", "status"),
        )
        self._by_key = counter(
            "orca_api_key_requests", "Answered HTTP requests by the name of their key.", "key", "status"
        )
        self.key_file_broken = gauge(
            "orca_api_keys_file_broken", "1 while the file of API keys cannot be used; then the old keys stay valid."
        )
        self.open_connections = gauge("orca_open_generations", "Open connections that wait for tokens.")
        self.asyncio_tasks = gauge(
            "orca_asyncio_tasks",
            "Unfinished tasks of this process's event loop, including the scrape's own.",
        )
        self.disconnects = counter("orca_client_disconnects", "Clients that left before the end of their answer.")
        self._pool = {name: gauge(f"orca_pool_{name}", text) for name, text in _POOL_GAUGES.items()}
        self._model = model
        vllm = VllmNames(self.registry, Exporter.GATEWAY, model, lambda _: ENGINE)
        self._names = MetricNames(self.registry, names, vllm)

    def page(self) -> bytes:
        """Return the page that a scrape reads."""
        return self._names.page()

    def count_end(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()

    def count_goal(self, goal: Goal, outcome: GoalOutcome) -> None:
        self._goals.labels(self._model, goal, outcome).inc()

    def count_deadline(self, outcome: DeadlineOutcome, weight: float) -> None:
        """Count the outcome of a request. Args: weight: of the request's utility."""
        self._deadlines.labels(self._model, outcome).inc()
        if outcome is DeadlineOutcome.IN_TIME:
            self._utility.inc(weight)

    def count_refused_deadline(self) -> None:
        """Count a call that was refused because its deadline cannot be met."""
        self._deadlines.labels(self._model, REFUSED).inc()

    def count_http(self, method: str, route: str, status: int) -> None:
        self._http.labels(method, route, str(status)).inc()

    def count_refused_connection(self, status: int) -> None:
        self.count_http("none", "none", status)

    def count_key(self, name: str, status: int) -> None:
        self._by_key.labels(name, str(status)).inc()

    def set_pool(self, stats: PoolStats | None) -> None:
        """Set the pool's gauges. Args: stats: None if the pool did not answer; then its other gauges stay."""
        self._pool["up"].set(stats is not None)
        if stats is None:
            return
        self._pool["requests_waiting"].set(stats.queued)
        self._pool["requests_waiting_max"].set(stats.queued_max)
        self._pool["requests_running"].set(stats.owned)
        self._pool["requests_ended"].set(stats.ended)
        self._pool["oldest_wait_seconds"].set(stats.oldest_wait_ms / 1000)
        self._pool["reserved_bytes"].set(stats.bytes_reserved)
        self._pool["reserved_bytes_max"].set(stats.bytes_max)
        self._pool["groups"].set(len(stats.groups))
        self._pool["groups_formed"].set(len(stats.groups_formed))
