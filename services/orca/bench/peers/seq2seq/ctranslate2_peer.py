"""CTranslate2 as a peer with an encoder-decoder model:

    python -m orca.bench.peers.seq2seq.ctranslate2_peer convert WORKLOAD CONVERTED
    python -m orca.bench.peers.seq2seq.ctranslate2_peer float32|int8 by-source|by-answer WORKLOAD CONVERTED ANSWER
    python -m orca.bench.peers.seq2seq.ctranslate2_peer float32|int8 LIMIT WORKLOAD CONVERTED ANSWER

It runs with the Python of an environment that has the packages of ctranslate2.txt. From this package it imports only
modules that need nothing but the standard library. CONVERTED is a folder, to which `convert` writes the model.

A call of `translate_batch` is one static batch. It has one length for all its answers, so a callback ends each answer
at its own length. CTranslate2 then drops that row: the batch becomes smaller, and no token is decoded in vain. Without
the callback a batch would decode all rows until the longest answer ends.

If all requests come at once, batches are formed in one of the orders of orders.py; `by-source` is the library's own. If
they come one by one, the next batch has all requests that wait, at most LIMIT, whenever the last one has ended. An
answer counts as ready at its last token, although a call returns only at the end of its batch.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from orca.bench.peers.arrivals import Arrivals
from orca.bench.peers.seq2seq.orders import batches
from orca.bench.peers.workload import PeerAnswer, Workload
from orca.core.process.gc_freeze import freeze_all


def main(arguments: list[str]) -> None:
    if arguments[0] == "convert":
        workload_file, converted = arguments[1:]
        _convert(Workload.load(Path(workload_file)).model, converted)
        return
    precision, order_or_limit, workload_file, converted, answer_file = arguments
    workload = Workload.load(Path(workload_file))
    translator = CTranslate2(Path(converted), precision, workload.threads)
    translate_all(translator, workload.head(2 * workload.batch_size), "by-source")
    freeze_all()
    if workload.arrivals_s is None:
        answer = translate_all(translator, workload, order_or_limit)
    else:
        answer = translate_waiting(translator, workload, int(order_or_limit))
    answer.save(Path(answer_file))


def _convert(model: str, converted: str) -> None:
    converters: Any = import_module("ctranslate2.converters")
    converters.TransformersConverter(model).convert(converted, quantization="float32")


class CTranslate2:
    """A converted model, and the translation between its tokens, which are text, and their ids.

    Args:
        precision: a `compute_type` of CTranslate2.
    """

    def __init__(self, converted: Path, precision: str, threads: int) -> None:
        library: Any = import_module("ctranslate2")
        self._model = library.Translator(
            str(converted), device="cpu", compute_type=precision, inter_threads=1, intra_threads=threads
        )
        self._texts: list[str] = json.loads((converted / "shared_vocabulary.json").read_text())
        self._ids = {text: number for number, text in enumerate(self._texts)}

    def source(self, prompt: list[int]) -> list[str]:
        return [self._texts[token] for token in prompt]

    def translate(
        self, sources: list[list[str]], counts: list[int], numbers: list[int], arrivals: Arrivals
    ) -> list[list[int]]:
        """Run one static batch. Args: numbers: of the requests, for `arrivals`. Returns: the answers."""
        left = list(counts)

        def end_at_its_length(step: Any) -> bool:
            row: int = step.batch_id
            left[row] -= 1
            arrivals.record_tokens([numbers[row]])
            return left[row] == 0

        longest = max(counts)
        results = self._model.translate_batch(
            sources,
            beam_size=1,
            min_decoding_length=longest,
            max_decoding_length=longest,
            max_input_length=0,
            callback=end_at_its_length,
        )
        return [[self._ids[text] for text in result.hypotheses[0]] for result in results]


def translate_all(translator: CTranslate2, workload: Workload, order: str) -> PeerAnswer:
    """Run all requests at once, in batches of this order."""
    sources, answers = [translator.source(prompt) for prompt in workload.prompts], [list[int]()] * len(workload.prompts)
    start_s = perf_counter()
    arrivals = Arrivals(workload)
    for numbers in batches(workload, order):
        counts = [workload.new_tokens[number] for number in numbers]
        batch = translator.translate([sources[number] for number in numbers], counts, numbers, arrivals)
        for number, tokens in zip(numbers, batch, strict=True):
            answers[number] = tokens
    return PeerAnswer(
        seconds=perf_counter() - start_s, tokens=answers, first_s=arrivals.first_s, last_s=arrivals.last_s
    )


def translate_waiting(translator: CTranslate2, workload: Workload, limit: int) -> PeerAnswer:
    """Run requests that come one by one. Args: limit: most requests of a batch."""
    sources, answers = [translator.source(prompt) for prompt in workload.prompts], [list[int]()] * len(workload.prompts)
    start_s = perf_counter()
    arrivals, waiting = Arrivals(workload), list[int]()
    while arrivals.has_more or waiting:
        waiting += arrivals.take()
        if not waiting:
            arrivals.wait()
            continue
        numbers, waiting = waiting[:limit], waiting[limit:]
        counts = [workload.new_tokens[number] for number in numbers]
        batch = translator.translate([sources[number] for number in numbers], counts, numbers, arrivals)
        for number, tokens in zip(numbers, batch, strict=True):
            answers[number] = tokens
    return PeerAnswer(
        seconds=perf_counter() - start_s, tokens=answers, first_s=arrivals.first_s, last_s=arrivals.last_s
    )


if __name__ == "__main__":
    main(sys.argv[1:])
