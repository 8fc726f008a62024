"""Hugging Face transformers as a peer with an encoder-decoder model, and as the judge. Runs as its own process:

    python -m orca.bench.peers.seq2seq.transformers_peer arrival|by-source|by-answer WORKLOAD ANSWER
    python -m orca.bench.peers.seq2seq.transformers_peer judge WORKLOAD ANSWER [ANSWER TO JUDGE]

It runs static batches with `generate`, in one of the orders of orders.py. A batch runs until its longest answer ends;
tokens after a request's own end do not count. The library has no continuous batching for these models.
"""

import sys
from functools import partial
from time import perf_counter
from typing import Any

import torch

from orca.bench.peers.seq2seq.orders import ARRIVAL, BY_ANSWER, BY_SOURCE, batches
from orca.bench.peers.transformers_peer import import_transformers, run_mode
from orca.bench.peers.workload import PeerAnswer, PeerWorkload


def main(arguments: list[str]) -> None:
    ways = {order: partial(static_batching, order=order) for order in (ARRIVAL, BY_SOURCE, BY_ANSWER)}
    run_mode(arguments, _load, _logits, ways)


def _load(folder: str) -> Any:
    transformers = import_transformers()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    # No token ends a request early: `generate` takes its defaults from this configuration.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        num_beams=1,
        pad_token_id=model.config.pad_token_id,
        eos_token_id=None,
        decoder_start_token_id=model.config.decoder_start_token_id,
    )
    return model.eval()


@torch.inference_mode()
def static_batching(model: Any, workload: PeerWorkload, order: str) -> PeerAnswer:
    """Run request-level batching by `generate`. Args: order: one of those of orders.py."""
    answers: list[list[int]] = [[] for _ in workload.prompts]
    start_s = perf_counter()
    for numbers in batches(workload, order):
        sources = [torch.tensor(workload.prompts[number]) for number in numbers]
        counts = [workload.new_tokens[number] for number in numbers]
        ids, mask = (
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            for rows in (sources, [torch.ones_like(source) for source in sources])
        )
        longest = max(counts)
        out = model.generate(input_ids=ids, attention_mask=mask, min_new_tokens=longest, max_new_tokens=longest)
        for number, row, count in zip(numbers, out[:, 1:].tolist(), counts, strict=True):
            answers[number] = row[:count]
    return PeerAnswer(seconds=perf_counter() - start_s, tokens=answers)


def _logits(model: Any, source: list[int], answer: list[int]) -> torch.Tensor:
    """Return the logits of one pass over one request, without batch, padding or cache."""
    target = torch.tensor([[model.config.decoder_start_token_id, *answer[:-1]]])
    logits: torch.Tensor = model(input_ids=torch.tensor([source]), decoder_input_ids=target, use_cache=False).logits
    return logits[0]


if __name__ == "__main__":
    main(sys.argv[1:])
