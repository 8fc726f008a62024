"""vLLM on CPUs as a peer: its engine in this process, or its server. Run by the Python of an environment that has what
vllm.txt lists; of this package it imports only what needs nothing but the standard library.

    python -m orca.bench.peers.vllm_peer float32|bfloat16 WORKLOAD ANSWER
    python -m orca.bench.peers.vllm_peer serve WORKLOAD PORT

All is as vLLM chooses, its compiled layers and the tokens of a step among it, but for the requests of a batch, the
cache, which is large enough and looks for no common beginnings (random prompts have none), and the threads: as many as
all others have. The engine runs in this process. The server has another one for it, whose threads are bound to a
processor each: where they are not, it makes 252 instead of 293 tokens/s (63 M parameters, two processors, one run).
"""

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from orca.bench.peers.arrivals import serve
from orca.bench.peers.workload import Answer, Workload
from orca.core.process.gc_freeze import freeze_all

CACHE_BLOCK_TOKENS = 128
"""On a CPU."""


def main(arguments: list[str]) -> None:
    mode, workload_file, last = arguments
    workload = Workload.load(Path(workload_file))
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
    Answer(seconds=perf_counter() - start_s, **answer).save(Path(last))


def variables(workload: Workload) -> Mapping[str, str]:
    """What vLLM is told by its environment."""
    processors = sorted(os.sched_getaffinity(0))[: workload.threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(workload.cache_gib(CACHE_BLOCK_TOKENS)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def server_command(workload: Workload, *, port: int) -> list[str]:
    """Its server of the OpenAI API, in float32."""
    flags = {
        "--model": workload.model,
        "--dtype": "float32",
        "--max-num-seqs": workload.batch_size,
        "--max-model-len": workload.longest,
        "--generation-config": "vllm",  # no sampling defaults of the model's
        "--host": "127.0.0.1",
        "--port": port,
    }
    words = [str(part) for flag in flags.items() for part in flag]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, "--no-enable-prefix-caching"]


def _engine(workload: Workload, dtype: str) -> tuple[Any, Callable[[int], Any]]:
    """Returns: the engine, and what makes the parameters of a request of so many tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    vllm: Any = import_module("vllm")
    kinds: Any = import_module("vllm.sampling_params").RequestOutputKind
    llm = vllm.LLM(
        model=workload.model,
        dtype=dtype,
        max_num_seqs=workload.batch_size,
        max_model_len=workload.longest,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def make_params(count: int) -> Any:
        return vllm.SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=kinds.DELTA
        )

    return llm.llm_engine, make_params


class VllmEngine:
    """arrivals.Stepped.

    Args:
        engine: vLLM's.
        make_params: what makes the parameters of a request of so many tokens.
    """

    def __init__(self, engine: Any, workload: Workload, make_params: Callable[[int], Any]) -> None:
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
