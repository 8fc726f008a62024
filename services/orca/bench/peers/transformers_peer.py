"""Hugging Face transformers as a peer, and as the judge of all systems' tokens. Runs as its own process:

    python -m orca.bench.peers.transformers_peer static|continuous|judge WORKLOAD ANSWER [ANSWER TO JUDGE]

`static` is the usual request-level batching with `generate`: batches in order of arrival, padded on the left, each
until its longest request ends. `continuous` is the library's own continuous batching with its paged cache.
`transformers` is imported only in this module, because it is not a dependency of the product.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from orca.bench.peers.judgement import judge
from orca.bench.peers.workload import PeerAnswer, PeerWorkload
from orca.core.process.gc_freeze import freeze_all

CONTINUOUS_BATCH_TOKENS = 256
"""Most tokens of a step in continuous batching: the peer's best of 128, 256, 512 and 1024, which differ by up to 7 % in
tokens per second of processor time (63 M parameters, batch 16, prompts U(16,128))."""


def main(arguments: list[str]) -> None:
    run_mode(arguments, _load, _logits, {"static": static_batching, "continuous": continuous_batching})


def run_mode(
    arguments: list[str],
    load: Callable[[str], Any],
    logits: Callable[[Any, list[int], list[int]], torch.Tensor],
    ways: Mapping[str, Callable[[Any, PeerWorkload], PeerAnswer]],
) -> None:
    """Run a workload in one of some ways after a warm-up, or judge an answer, as the arguments say.

    Args:
        load: reads the model of a folder.
        logits: (model, prompt, answer) -> logits before each token of the answer, `[len(answer), vocab]`.
        ways: by the mode that names them.
    """
    mode, workload_file, answer_file = arguments[:3]
    workload = PeerWorkload.load(Path(workload_file))
    torch.set_num_threads(workload.threads)
    model = load(workload.model)
    if mode == "judge":
        answers = PeerAnswer.load(Path(arguments[3])).tokens
        with torch.inference_mode():
            judgement = judge(workload.prompts, workload.new_tokens, answers, partial(logits, model))
        Path(answer_file).write_text(json.dumps(judgement.to_json()))
        return
    ways[mode](model, workload.head(2 * workload.batch_size))
    freeze_all()
    ways[mode](model, workload).save(Path(answer_file))


def _load(folder: str) -> Any:
    transformers = import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return without_end_token(model)


def import_transformers() -> Any:
    """Import `transformers`, which is partly untyped, and make it print less."""
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def without_end_token(model: Any) -> Any:
    """Prepare a model so that no token ends a request early: `generate` takes its defaults from this configuration."""
    transformers: Any = import_module("transformers")
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model.eval()


@torch.inference_mode()
def static_batching(model: Any, workload: PeerWorkload) -> PeerAnswer:
    """Run request-level batching by `generate`."""
    answers: list[list[int]] = []
    start_s = perf_counter()
    for first in range(0, len(workload.prompts), workload.batch_size):
        prompts = workload.prompts[first : first + workload.batch_size]
        counts = workload.new_tokens[first : first + workload.batch_size]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device
        )
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max(counts), min_new_tokens=None)
        answers += [row[width : width + count].tolist() for row, count in zip(out, counts, strict=True)]
    return PeerAnswer(seconds=perf_counter() - start_s, tokens=answers)


def continuous_batching(model: Any, workload: PeerWorkload, batch_tokens: int = CONTINUOUS_BATCH_TOKENS) -> PeerAnswer:
    """Run the library's continuous batching; its start and stop, which take more than half a second, do not count.

    Args: batch_tokens: most tokens of a step.
    Raises: RuntimeError if it fails.
    """
    transformers: Any = import_module("transformers")
    config = _continuous_config(transformers.ContinuousBatchingConfig, workload, batch_tokens)
    generation = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1, max_new_tokens=1)
    tokens: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        requests = enumerate(zip(workload.prompts, workload.new_tokens, strict=True))
        start_s = perf_counter()
        for index, (prompt, count) in requests:
            manager.add_request(prompt, request_id=str(index), max_new_tokens=count)
        while len(tokens) < len(workload.prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"continuous batching failed: {result.error}")
                tokens[result.request_id] = result.generated_tokens
            elif not manager.is_running():
                raise RuntimeError("continuous batching stopped before all requests ended")
        seconds = perf_counter() - start_s
    return PeerAnswer(seconds=seconds, tokens=[tokens[str(index)] for index in range(len(workload.prompts))])


def _continuous_config(kind: Any, workload: PeerWorkload, batch_tokens: int) -> Any:
    page_tokens = 32
    known = {each.name for each in fields(kind)}
    return kind(
        **{"page_size" if "page_size" in known else "block_size": page_tokens},  # its name before transformers 5.17
        # Memory for two full batches of the longest requests: the cache never limits this peer.
        num_blocks=2 * workload.batch_size * (workload.longest // page_tokens + 1),
        max_batch_tokens=batch_tokens,
        # Older versions have no such bound: they run as many requests as fit.
        **({"max_requests_per_batch": workload.batch_size} if "max_requests_per_batch" in known else {}),
        allow_block_sharing=workload.is_shared,  # where prompts share no prefix, the search would only cost time
    )


def _logits(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the logits of one pass over one request, without batch, padding or cache."""
    ids = torch.tensor([prompt + answer[:-1]])
    logits: torch.Tensor = model(input_ids=ids, logits_to_keep=len(answer), use_cache=False).logits
    return logits[0]


if __name__ == "__main__":
    main(sys.argv[1:])
