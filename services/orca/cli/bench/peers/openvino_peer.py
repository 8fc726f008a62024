"""OpenVINO GenAI as a peer: its own continuous batching with a paged cache. Run by the Python of an environment that
has what openvino.txt lists; of this package it imports only what needs nothing but the standard library.

    python -m orca.cli.bench.peers.openvino_peer f32|default WORKLOAD ANSWER CONVERTED

CONVERTED is a folder: the model in OpenVINO's format, made there when it is not. `f32` computes and caches in float32,
`default` as OpenVINO chooses: bfloat16 where the processor has it, and a cache of 8 bits.
"""

import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from orca.cli.bench.peers.workload import Answer, Workload

BATCH_TOKENS = 256
"""Tokens that a step may hold: its own default, which cuts long prompts into chunks."""


def main(arguments: list[str]) -> None:
    precision, workload_file, answer_file, converted = arguments
    workload, folder = Workload.load(Path(workload_file)), Path(converted)
    if not (folder / "openvino_model.xml").exists():
        exporters: Any = import_module("optimum.exporters.openvino")
        exporters.main_export(
            workload.model,
            folder,
            task="text-generation-with-past",
            ov_config=_full_precision(),
            library_name="transformers",
        )
    pipeline = _pipeline(folder, precision, workload)
    _run(pipeline, workload.head(2 * workload.batch_size))
    start_s = perf_counter()
    tokens = _run(pipeline, workload)
    Answer(seconds=perf_counter() - start_s, tokens=tokens).save(Path(answer_file))


def _full_precision() -> Any:
    """Weights stay as they are in the checkpoint."""
    intel: Any = import_module("optimum.intel")
    return intel.OVConfig(dtype="fp32")


def _pipeline(folder: Path, precision: str, workload: Workload) -> Any:
    genai: Any = import_module("openvino_genai")
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_seqs = workload.batch_size
    scheduling.max_num_batched_tokens = BATCH_TOKENS
    scheduling.cache_size = 1  # GB: more than all requests need
    scheduling.enable_prefix_caching = False  # random prompts share nothing: looking for it would only cost
    options: dict[str, object] = {"INFERENCE_NUM_THREADS": workload.threads}
    if precision == "f32":
        options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return genai.ContinuousBatchingPipeline(str(folder), scheduling, "CPU", options)


def _run(pipeline: Any, workload: Workload) -> list[list[int]]:
    genai, openvino, numpy = (import_module(name) for name in ("openvino_genai", "openvino", "numpy"))
    inputs, configs = [], []
    for prompt, count in zip(workload.prompts, workload.new_tokens, strict=True):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        inputs.append(openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)))
        configs.append(config)
    return [list(result.m_generation_ids[0]) for result in pipeline.generate(inputs, configs)]


if __name__ == "__main__":
    main(sys.argv[1:])
