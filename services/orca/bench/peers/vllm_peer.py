"""vLLM on CPUs as a peer: its engine in this process, or its server.

    python -m orca.bench.peers.vllm_peer float32|bfloat16 WORKLOAD ANSWER
    python -m orca.bench.peers.vllm_peer serve WORKLOAD PORT

It runs with the Python of an environment that has the packages of vllm.txt. From this package it imports only modules
that need nothing but the standard library.

vLLM keeps its defaults, including compiled layers and the tokens of a step, with three exceptions. The requests of a
batch are those of the comparison. The cache is large enough, and searches for common prefixes only where prompts have
some. The number of threads is the same as for all systems. The engine runs in this process. The server runs it in
another process, with each thread bound to a processor: without this it generates 252 instead of 293 tokens/s (63 M
parameters, two processors, one run).
"""

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from orca.bench.peers.arrivals import serve
from orca.bench.peers.workload import PeerAnswer, PeerWorkload
from orca.core.process.gc_freeze import freeze_all

CACHE_BLOCK_TOKENS = 128
"""vLLM's block size on a CPU."""


def main(arguments: list[str]) -> None:
    mode, workload_file, last = arguments
    workload = PeerWorkload.load(Path(workload_file))
    os.environ.update(variables(workload))
    if mode == "serve":
        command = server_command(workload, port=int(last))
        os.execv(command[0], command)
    engine, make_params = _engine(workload, mode)
    head = workload.head(2 * workload.batch_size)
    serve(head, VllmEngine(engine, head, make_params))
    freeze_all()
    start_s = perf_counter()
    answer = serve(workload, VllmEngine(engine, workload, make_params))
    PeerAnswer(seconds=perf_counter() - start_s, **answer).save(Path(last))


def variables(workload: PeerWorkload) -> Mapping[str, str]:
    """Return the environment variables for vLLM."""
    processors = sorted(os.sched_getaffinity(0))[: workload.threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(workload.cache_gib(CACHE_BLOCK_TOKENS)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def server_command(workload: PeerWorkload, *, port: int) -> list[str]:
    """Return the command of vLLM's server of the OpenAI API, in float32."""
    flags = {
        "--model": workload.model,
        "--dtype": "float32",
        "--max-num-seqs": workload.batch_size,
        "--max-model-len": workload.longest,
        "--generation-config": "vllm",  # without the model's sampling defaults
        "--host": "127.0.0.1",
        "--port": port,
    }
    words = [str(part) for flag in flags.items() for part in flag]
    words.append("--enable-prefix-caching" if workload.is_shared else "--no-enable-prefix-caching")
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]


def _engine(workload: PeerWorkload, dtype: str) -> tuple[Any, Callable[[int], Any]]:
    """Return the engine, and a function that makes the parameters of a request with a number of tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    vllm: Any = import_module("vllm")
    kinds: Any = import_module("vllm.sampling_params").RequestOutputKind
    llm = vllm.LLM(
        model=workload.model,
        dtype=dtype,
        max_num_seqs=workload.batch_size,
        max_model_len=workload.longest,
        enable_prefix_caching=workload.is_shared,
        skip_tokenizer_init=True,
    )

    def make_params(count: int) -> Any:
        return vllm.SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=kinds.DELTA
        )

    return llm.llm_engine, make_params


class VllmEngine:
    """vLLM's engine as an `arrivals.SteppedSystem`.

    Args:
        engine: vLLM's.
        make_params: makes the parameters of a request with a number of tokens.
    """

    def __init__(self, engine: Any, workload: PeerWorkload, make_params: Callable[[int], Any]) -> None:
        self._engine, self._workload, self._make_params = engine, workload, make_params

    def add(self, number: int) -> None:
        prompt = {"prompt_token_ids": self._workload.prompts[number]}
        self._engine.add_request(str(number), prompt, self._make_params(self._workload.new_tokens[number]))

    @property
    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> dict[int, list[int]]:
        return {int(output.request_id): output.outputs[0].token_ids for output in self._engine.step()}


if __name__ == "__main__":
    main(sys.argv[1:])
