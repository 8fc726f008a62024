"""CTranslate2 as a peer with an encoder-decoder model:

    python -m orca.bench.peers.seq2seq.ctranslate2_peer convert WORKLOAD CONVERTED
    python -m orca.bench.peers.seq2seq.ctranslate2_peer float32|int8 AT_ONCE ORDER WORKLOAD CONVERTED ANSWER
    python -m orca.bench.peers.seq2seq.ctranslate2_peer float32|int8 AT_ONCE LIMIT WORKLOAD CONVERTED ANSWER

It runs with the Python of an environment that has the packages of ctranslate2.txt. From this package it imports only
modules that need nothing but the standard library. CONVERTED is a folder, to which `convert` writes the model.

A call of `translate_batch` is one static batch. It has one length for all its answers, so a callback ends each answer
at its own length. CTranslate2 then drops that row: the batch becomes smaller, and no token is decoded in vain. Without
the callback a batch would decode all rows until the longest answer ends.

AT_ONCE batches run at the same time and share the threads. If all requests come at once, batches are formed in an ORDER
of orders.py; `by-source` is the library's own. If they come one by one, the next batch has all requests that wait, at
most LIMIT, whenever one has ended. An answer counts as ready at its last token, although a call returns only at the end
of its batch.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

from orca.bench.peers.arrivals import Arrivals
from orca.bench.peers.seq2seq.orders import batches
from orca.bench.peers.workload import PeerAnswer, PeerWorkload
from orca.core.process.gc_freeze import freeze_all


def main(arguments: list[str]) -> None:
    if arguments[0] == "convert":
        workload_file, converted = arguments[1:]
        _convert(PeerWorkload.load(Path(workload_file)).model, converted)
        return
    precision, at_once, order_or_limit, workload_file, converted, answer_file = arguments
    workload = PeerWorkload.load(Path(workload_file))
    translator = CTranslate2(Path(converted), precision, batches_at_once=int(at_once), threads=workload.threads)
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
        batches_at_once: number of batches that may run at the same time.
        threads: of all these batches together.
    """

    def __init__(self, converted: Path, precision: str, *, batches_at_once: int, threads: int) -> None:
        library: Any = import_module("ctranslate2")
        self.batches_at_once = batches_at_once
        self._model = library.Translator(
            str(converted),
            device="cpu",
            compute_type=precision,
            inter_threads=batches_at_once,
            intra_threads=threads // batches_at_once,
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


def translate_all(translator: CTranslate2, workload: PeerWorkload, order: str) -> PeerAnswer:
    """Run all requests at once, in batches of this order."""
    coming = iter(batches(workload, order))
    return _translate(translator, workload, lambda _: next(coming, []))


def translate_waiting(translator: CTranslate2, workload: PeerWorkload, limit: int) -> PeerAnswer:
    """Run requests that come one by one. Args: limit: most requests of a batch."""
    waiting: list[int] = []

    def next_batch(arrivals: Arrivals) -> list[int]:
        waiting.extend(arrivals.take())
        while arrivals.has_more and not waiting:
            arrivals.wait()
            waiting.extend(arrivals.take())
        batch = waiting[:limit]
        del waiting[:limit]
        return batch

    return _translate(translator, workload, next_batch)


def _translate(
    translator: CTranslate2, workload: PeerWorkload, next_batch: Callable[[Arrivals], list[int]]
) -> PeerAnswer:
    """Run batches until there is none. Args: next_batch: returns the numbers of requests, and none at the end."""
    sources, answers = [translator.source(prompt) for prompt in workload.prompts], [list[int]()] * len(workload.prompts)
    lock = Lock()

    def work() -> None:
        while True:
            with lock:
                numbers = next_batch(arrivals)
            if not numbers:
                return
            counts = [workload.new_tokens[number] for number in numbers]
            batch = translator.translate([sources[number] for number in numbers], counts, numbers, arrivals)
            for number, tokens in zip(numbers, batch, strict=True):
                answers[number] = tokens

    start_s = perf_counter()
    arrivals = Arrivals(workload)
    with ThreadPoolExecutor(translator.batches_at_once) as workers:
        for worker in [workers.submit(work) for _ in range(translator.batches_at_once)]:
            worker.result()
    return PeerAnswer(
        seconds=perf_counter() - start_s, tokens=answers, first_s=arrivals.first_s, last_s=arrivals.last_s
    )


if __name__ == "__main__":
    main(sys.argv[1:])
