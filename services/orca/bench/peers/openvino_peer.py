"""OpenVINO GenAI as a peer: its own continuous batching with a paged cache.

    python -m orca.bench.peers.openvino_peer convert WORKLOAD CONVERTED
    python -m orca.bench.peers.openvino_peer f32|default WORKLOAD CONVERTED ANSWER

It runs with the Python of an environment that has the packages of openvino.txt. From this package it imports only
modules that need nothing but the standard library.

CONVERTED is a folder. `convert` writes the model there in OpenVINO's format. It is a separate process, so that its
memory does not count as memory of a run. `f32` computes and caches in float32, `default` as OpenVINO chooses: bfloat16
if the processor supports it, and a cache of 8 bits.
"""

import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from orca.bench.peers.arrivals import serve
from orca.bench.peers.workload import PeerAnswer, PeerWorkload
from orca.core.process.gc_freeze import freeze_all

BATCH_TOKENS = 256
"""Most tokens of a step: OpenVINO's own default, which cuts long prompts into chunks."""

CACHE_BLOCK_TOKENS = 32
"""OpenVINO's block size on a CPU."""


def main(arguments: list[str]) -> None:
    mode, workload_file, converted, *answer_file = arguments
    workload, folder = PeerWorkload.load(Path(workload_file)), Path(converted)
    if mode == "convert":
        _convert(Path(workload.model), folder)
        return
    pipeline = _pipeline(folder, mode, workload)
    _generate(pipeline, _requests(workload.head(2 * workload.batch_size)))
    freeze_all()
    start_s = perf_counter()
    if workload.arrivals_s is None:
        answer = _generate(pipeline, _requests(workload))
    else:
        answer = serve(workload, OpenVinoPipeline(pipeline, workload, _requests(workload)))
    answer["seconds"] = perf_counter() - start_s
    PeerAnswer(**answer).save(Path(answer_file[0]))


def _convert(model: Path, folder: Path) -> None:
    exporters: Any = import_module("optimum.exporters.openvino")
    intel: Any = import_module("optimum.intel")
    exporters.main_export(
        str(model),
        folder,
        task="text-generation-with-past",
        # Weights stay unchanged from the checkpoint.
        ov_config=intel.OVConfig(dtype="fp32"),
        library_name="transformers",
    )


def _pipeline(folder: Path, precision: str, workload: PeerWorkload) -> Any:
    genai: Any = import_module("openvino_genai")
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_seqs = workload.batch_size
    scheduling.max_num_batched_tokens = BATCH_TOKENS
    scheduling.cache_size = workload.cache_gib(CACHE_BLOCK_TOKENS)
    # Random prompts share no prefix: the search would only cost time.
    scheduling.enable_prefix_caching = workload.is_shared
    options: dict[str, object] = {"INFERENCE_NUM_THREADS": workload.threads}
    if precision == "f32":
        options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return genai.ContinuousBatchingPipeline(str(folder), scheduling, "CPU", options)


def _requests(workload: PeerWorkload) -> list[tuple[Any, Any]]:
    """Return the prompt and the generation settings of each request in the pipeline's types."""
    genai, openvino, numpy = (import_module(name) for name in ("openvino_genai", "openvino", "numpy"))
    requests = []
    for prompt, count in zip(workload.prompts, workload.new_tokens, strict=True):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        requests.append((openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config))
    return requests


def _generate(pipeline: Any, requests: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Run all requests at once. Returns: fields of a PeerAnswer, without the times of tokens."""
    results = pipeline.generate([prompt for prompt, _ in requests], [config for _, config in requests])
    return {"tokens": [list(result.m_generation_ids[0]) for result in results]}


class OpenVinoPipeline:
    """OpenVINO's pipeline as an `arrivals.SteppedSystem`.

    Args:
        pipeline: OpenVINO's.
        requests: prompt and configuration of each.
    """

    def __init__(self, pipeline: Any, workload: PeerWorkload, requests: list[tuple[Any, Any]]) -> None:
        self._pipeline, self._requests = pipeline, requests
        self._left = list(workload.new_tokens)  # number of missing tokens, by request
        self._running: dict[int, Any] = {}  # handles, by request

    def add(self, number: int) -> None:
        self._running[number] = self._pipeline.add_request(number, *self._requests[number])

    @property
    def is_busy(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    def step(self) -> dict[int, list[int]]:
        self._pipeline.step()
        new_tokens = {number: _read(handle) for number, handle in self._running.items()}
        for number, new in new_tokens.items():
            self._left[number] -= len(new)
            if self._left[number] <= 0:
                del self._running[number]
        return new_tokens


def _read(handle: Any) -> list[int]:
    """Return the tokens that a request has received since the last call."""
    new: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            new += output.generated_ids
    return new


if __name__ == "__main__":
    main(sys.argv[1:])
