"""The metrics of vLLM, and which of ours have the same meaning: one table for code, documentation and tests.

Each metric of vLLM is exported by one part only, so that a query never counts twice. Gateways export what concerns the
client or the pool, schedulers what concerns a group. `renamed.py` exports it, and adds no counting of its own.

Source: `vllm/v1/metrics/loggers.py` of vLLM 0.33.0. Counters stand without their suffix `_total`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from orca.core.domain.request import FinishReason

VLLM_VERSION = "0.33.0"
"""Release of vLLM whose names, types and labels the table has."""


class Exporter(StrEnum):
    """The part of Orca that exports a metric."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class SameMeaning:
    """A metric of vLLM that Orca exports too."""

    vllm: str
    orca: str
    exporter: Exporter
    note: str = ""  # differences that a reader of a dashboard could notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Metrics of vLLM that Orca does not export, for one reason."""

    names: tuple[str, ...]
    reason: str


_BUCKETS = "Other buckets"

SAME_MEANING = (
    SameMeaning(
        vllm="vllm:prefix_cache_queries",
        orca="orca_prefix_cache_queries",
        exporter=Exporter.SCHEDULER,
        note="0 without a prefix cache",
    ),
    SameMeaning(vllm="vllm:prefix_cache_hits", orca="orca_prefix_cache_hits", exporter=Exporter.SCHEDULER),
    SameMeaning(
        vllm="vllm:num_requests_waiting",
        orca="orca_pool_requests_waiting",
        exporter=Exporter.GATEWAY,
        note="The queue of the whole pool: each gateway reports the same number, so join with `max by (model_name)`",
    ),
    SameMeaning(
        vllm="vllm:time_to_first_token_seconds",
        orca="orca_time_to_first_token_seconds",
        exporter=Exporter.GATEWAY,
        note=f"Once per call, not per choice. {_BUCKETS}: the last one is 160 s",
    ),
    SameMeaning(
        vllm="vllm:inter_token_latency_seconds",
        orca="orca_inter_token_latency_seconds",
        exporter=Exporter.GATEWAY,
        note=f"{_BUCKETS}: from 1 ms to 5 s",
    ),
    SameMeaning(
        vllm="vllm:request_time_per_output_token_seconds",
        orca="orca_request_time_per_output_token_seconds",
        exporter=Exporter.GATEWAY,
        note=f"Not for a request of one token, which counts as 0 in vLLM. {_BUCKETS}: from 1 ms to 5 s",
    ),
    SameMeaning(
        vllm="vllm:e2e_request_latency_seconds",
        orca="orca_e2e_request_latency_seconds",
        exporter=Exporter.GATEWAY,
        note=f"Once per call, not per choice. {_BUCKETS}: from 1 ms to 160 s",
    ),
    SameMeaning(
        vllm="vllm:request_prompt_tokens",
        orca="orca_request_prompt_tokens",
        exporter=Exporter.GATEWAY,
        note=f"Counted when the request is accepted, not at its end. {_BUCKETS}: up to 100,000 for every model",
    ),
    SameMeaning(
        vllm="vllm:request_generation_tokens",
        orca="orca_request_generation_tokens",
        exporter=Exporter.GATEWAY,
        note=f"{_BUCKETS}: up to 100,000 for every model",
    ),
    SameMeaning(
        vllm="vllm:request_max_num_generation_tokens",
        orca="orca_request_max_num_generation_tokens",
        exporter=Exporter.GATEWAY,
        note=f"{_BUCKETS}: up to 100,000 for every model",
    ),
    SameMeaning(
        vllm="vllm:request_params_n",
        orca="orca_request_params_n",
        exporter=Exporter.GATEWAY,
        note=f"{_BUCKETS}: 50 and 100, too",
    ),
    SameMeaning(
        vllm="vllm:request_params_max_tokens",
        orca="orca_request_params_max_tokens",
        exporter=Exporter.GATEWAY,
        note=f"{_BUCKETS}: up to 100,000 for every model",
    ),
    SameMeaning(
        vllm="vllm:prompt_tokens",
        orca="orca_prompt_tokens",
        exporter=Exporter.GATEWAY,
        note="Counted when the request is accepted. Prompts that run again after a failure count once",
    ),
    SameMeaning(
        vllm="vllm:generation_tokens",
        orca="orca_generation_tokens",
        exporter=Exporter.GATEWAY,
        note="Tokens delivered to clients. Tokens that nobody reads do not count",
    ),
    SameMeaning(
        vllm="vllm:request_success",
        orca="orca_request_success",
        exporter=Exporter.GATEWAY,
        note="`stop`, `length`, `abort` (cancelled, deadline_exceeded) and `error` (error, refused, model_replaced). A"
        " client that leaves counts in `orca_client_disconnects_total` instead of `abort`",
    ),
    SameMeaning(
        vllm="vllm:num_requests_running",
        orca="orca_num_requests_running",
        exporter=Exporter.SCHEDULER,
        note="Requests of one group: add up the groups. A request that a group has claimed and not run yet is neither"
        " in this gauge nor in that of waiting requests",
    ),
    SameMeaning(
        vllm="vllm:kv_cache_usage_perc",
        orca="orca_kv_cache_usage_perc",
        exporter=Exporter.SCHEDULER,
        note="A request reserves the slots of its longest output at its start, so the share is higher than in vLLM",
    ),
    SameMeaning(
        vllm="vllm:cache_config_info",
        orca="orca_kv_cache_info",
        exporter=Exporter.SCHEDULER,
        note="Labels `block_size`, `num_gpu_blocks`, `kv_cache_size_tokens`, `cache_dtype`, and `model_name`, which is"
        " not among vLLM's. No sample while the group is not formed",
    ),
    SameMeaning(
        vllm="vllm:request_queue_time_seconds",
        orca="orca_request_queue_time_seconds",
        exporter=Exporter.SCHEDULER,
        note=f"Counted at the request's first claim, not at its end. {_BUCKETS}: from 1 ms to 160 s",
    ),
    SameMeaning(
        vllm="vllm:request_prefill_time_seconds",
        orca="orca_request_prefill_time_seconds",
        exporter=Exporter.SCHEDULER,
        note=f"Without requests that changed the group or lost it. {_BUCKETS}: from 1 ms to 160 s",
    ),
    SameMeaning(
        vllm="vllm:request_decode_time_seconds",
        orca="orca_request_decode_time_seconds",
        exporter=Exporter.SCHEDULER,
        note=f"Without requests that changed the group or lost it. {_BUCKETS}: from 1 ms to 160 s",
    ),
    SameMeaning(
        vllm="vllm:request_inference_time_seconds",
        orca="orca_request_inference_time_seconds",
        exporter=Exporter.SCHEDULER,
        note=f"Without requests that changed the group or lost it. {_BUCKETS}: from 1 ms to 160 s",
    ),
    SameMeaning(
        vllm="vllm:iteration_tokens_total",
        orca="orca_iteration_tokens",
        exporter=Exporter.SCHEDULER,
        note=f"A histogram, in spite of its name. {_BUCKETS}: 2 and 4, too",
    ),
)
"""Metrics of equal meaning, those of the gateway first."""

MISSING = (
    Missing(
        names=(
            *("vllm:prompt_tokens_by_source", "vllm:prompt_tokens_cached", "vllm:prompt_tokens_cached_by_source"),
            "vllm:request_prefill_kv_computed_tokens",
            *("vllm:kv_block_lifetime_seconds", "vllm:kv_block_idle_before_evict_seconds"),
            "vllm:kv_block_reuse_gap_seconds",
        ),
        reason="`orca_prefix_cache_...` shows what the prefix cache finds and what leaves it",
    ),
    Missing(
        names=("vllm:num_preemptions", "vllm:request_num_preemptions"),
        reason="Orca never preempts: a request that runs has reserved all its slots",
    ),
    Missing(
        names=("vllm:num_requests_waiting_by_reason",),
        reason="Requests wait for capacity only. A deferred state does not exist",
    ),
    Missing(
        names=("vllm:admission_rejections",),
        reason="`orca_http_requests_total` counts refused calls by status (429, 503)",
    ),
    Missing(
        names=("vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits"),
        reason="KV blocks are not shared between instances",
    ),
    Missing(names=("vllm:num_requests_kv_fetch_by_stage",), reason="KV blocks are not fetched from other instances"),
    Missing(names=("vllm:mm_cache_queries", "vllm:mm_cache_hits"), reason="Orca serves text only"),
    Missing(names=("vllm:lora_requests_info",), reason="Orca has no LoRA adapters"),
    Missing(
        names=("vllm:engine_sleep_state",), reason="Groups do not sleep. `orca_pool_groups_formed` shows who serves"
    ),
    Missing(names=("vllm:corrupted_requests",), reason="Logits are not searched for NaN. vLLM has it as an option"),
    Missing(names=("vllm:watermark_requests",), reason="Orca has no watermarks"),
)
"""Metrics of vLLM without an equal in Orca. Those of vLLM's speculative decoding and of its connectors are not named.

Names that vLLM has removed (such as `vllm:gpu_cache_usage_perc` and `vllm:time_per_output_token_seconds`) are not
exported either.
"""

CACHE_LABELS: Mapping[str, str] = {
    "block_tokens": "block_size",
    "blocks": "num_gpu_blocks",
    "slots": "kv_cache_size_tokens",
    "dtype": "cache_dtype",
}
"""Labels of `orca_kv_cache_info` -> labels of `vllm:cache_config_info`, which has many more."""

FINISHED_REASONS: Mapping[str, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.DEADLINE_EXCEEDED: "abort",
    FinishReason.MODEL_REPLACED: "error",
    FinishReason.REFUSED: "error",
    FinishReason.ERROR: "error",
}
"""Orca's reason -> vLLM's `finished_reason`, which has `stop`, `length`, `abort`, `error` and `repetition`."""
