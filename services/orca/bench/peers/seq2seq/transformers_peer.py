"""Hugging Face transformers as a peer with an encoder-decoder model, and as the judge. Runs as its own process:

    python -m orca.bench.peers.seq2seq.transformers_peer arrival|by-source|by-answer WORKLOAD ANSWER
    python -m orca.bench.peers.seq2seq.transformers_peer judge WORKLOAD ANSWER [ANSWER TO JUDGE]

It runs static batches with `generate`, in one of the orders of orders.py. A batch runs until its longest answer ends;
tokens after a request's own end do not count. The library has no continuous batching for these models.
"""

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from orca.bench.peers.judgement import Judgement, judge
from orca.bench.peers.seq2seq.orders import batches
from orca.bench.peers.transformers_peer import import_transformers
from orca.bench.peers.workload import PeerAnswer, Workload
from orca.core.process.gc_freeze import freeze_all


def main(arguments: list[str]) -> None:
    mode, workload_file, answer_file = arguments[:3]
    workload = Workload.load(Path(workload_file))
    torch.set_num_threads(workload.threads)
    model = _load(workload.model)
    if mode == "judge":
        answers = PeerAnswer.load(Path(arguments[3])).tokens
        Path(answer_file).write_text(json.dumps(_judge(model, workload, answers).to_json()))
        return
    static_batching(model, workload.head(2 * workload.batch_size), mode)
    freeze_all()
    static_batching(model, workload, mode).save(Path(answer_file))


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
def static_batching(model: Any, workload: Workload, order: str) -> PeerAnswer:
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


@torch.inference_mode()
def _judge(model: Any, workload: Workload, answers: list[list[int]]) -> Judgement:
    start = model.config.decoder_start_token_id

    def reference(source: list[int], answer: list[int]) -> torch.Tensor:
        """Return the logits of one pass over one request, without batch, padding or cache."""
        target = torch.tensor([[start, *answer[:-1]]])
        logits: torch.Tensor = model(input_ids=torch.tensor([source]), decoder_input_ids=target, use_cache=False).logits
        return logits[0]

    return judge(workload.prompts, workload.new_tokens, answers, reference)


if __name__ == "__main__":
    main(sys.argv[1:])
