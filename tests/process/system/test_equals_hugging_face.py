"""Output equals Hugging Face, token for token, whatever the layout, the batch, the choices and the arrivals.

Greedy requests are compared with `generate`. Sampled ones have a seed and are compared with what the definition of
sampling draws from Hugging Face's logits. So they are the same in all settings and also right. Some of both have a
grammar, and are compared with `generate` under a logits processor that applies the same masks.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from orca.bench.parts.tiny_families import ENCODER_DECODERS, FAMILIES, tiny_checkpoint
from orca.core.domain.model import load_model_info
from orca.core.domain.request import SamplingParams
from orca.core.grammars.matching import NO_FORCING
from orca.scheduler.policy.cycle import CycleControls
from support.pairs import full, pairwise
from support.system.hugging_face import Reference, Verdict, generate, sample
from support.system.running_group import GREEDY, RunningGroup, Work

LAYOUTS = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2))
DIVIDED_LAYOUTS = ((3, 1), (2, 2))
"""These layouts cover the others: first, middle and last stages, and layers that ranks share. In `make test` families
take turns with the layouts, because most of a system's time is its start.
"""
# Up to four ranks load torch at once: on a busy machine that alone takes a minute.
pytestmark = pytest.mark.timeout(600)

SETTINGS = {
    "family": FAMILIES,
    "layout": LAYOUTS,
    # The cover takes the first where any would do: most often many requests side by side.
    "max_batch_size": (16, 3, 1),
    "prefetch": (0, 1),
    "strategy": ("whole", "chunks", "rra"),
}
CHUNK_TOKENS = 24  # above the largest batch
GREEDY_REQUESTS, SAMPLED_REQUESTS = 100, 20
GRAMMAR_STRIDE = 5
"""One of so many requests has a grammar, greedy ones and sampled ones, in one batch with the others."""
GRAMMARS = tuple(
    f"{grammar}\n{NO_FORCING}"
    for grammar in (
        'start: %json {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}',
        "start: /[a-f]{2,6}(-[0-9]+)?/",
        'start: "yes" | "no" | "maybe"',
        'start: item ("," item)*\nitem: /[A-Z]+/ | "(" start ")"',
    )
)
TEMPERATURE = 0.8
VOCABULARY = 188  # smaller than that of every family
START_TOKEN = 2  # of the encoder-decoder models
ALL_FAMILIES = (*FAMILIES, *ENCODER_DECODERS)

Case = dict[str, Any]


class Oracles:
    """Each family's checkpoint, its requests and what Hugging Face makes of them, made once. Counts all verdicts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.compared = 0
        self.excused = 0
        self._known: dict[tuple[str, int], tuple[Path, list[Work], list[Reference]]] = {}

    def of(self, family: str, stride: int) -> tuple[Path, list[Work], list[Reference]]:
        """Args: stride: only every so many of the requests."""
        if (family, stride) not in self._known:
            folder = tiny_checkpoint(family, self._folder / f"{family}-{stride}")
            works = some_works(seed=ALL_FAMILIES.index(family))[::stride]
            if family in ENCODER_DECODERS:
                works = [with_beginning(work, number) for number, work in enumerate(works)]
            greedy = [work for work in works if not work.sampling.temperature]
            references = generate(folder, greedy) + sample(folder, works[len(greedy) :], TEMPERATURE)
            self._known[family, stride] = folder, works, references
        return self._known[family, stride]


def some_works(seed: int) -> list[Work]:
    """Mixed lengths that arrive at random: in bursts, and with pauses in which early ones end."""
    chance = random.Random(seed)
    return [
        Work(
            prompt=tuple(chance.randrange(2, VOCABULARY) for _ in range(chance.randint(1, 40))),
            max_new_tokens=chance.randint(1, 20),
            sampling=with_grammar(
                GREEDY if number < GREEDY_REQUESTS else SamplingParams(temperature=TEMPERATURE, seed=number), number
            ),
            wait_s=chance.choice((0.0, 0.0, chance.uniform(0.0, 0.02))),
        )
        for number in range(GREEDY_REQUESTS + SAMPLED_REQUESTS)
    ]


def with_grammar(sampling: SamplingParams, number: int) -> SamplingParams:
    """The same with a grammar, if the request of this number has one."""
    if number % GRAMMAR_STRIDE:
        return sampling
    # Also every second one of them has each grammar.
    return replace(sampling, grammar=GRAMMARS[number // (2 * GRAMMAR_STRIDE) % len(GRAMMARS)])


def with_beginning(work: Work, number: int) -> Work:
    """The work for an encoder-decoder model. A third of the targets begins with more than the start token."""
    chance = random.Random(number)
    more = [chance.randrange(3, 180) for _ in range(chance.randint(1, 9))] if number % 3 == 0 else []
    return replace(work, decoder_prefix=(START_TOKEN, *more))


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracles]:
    oracles = Oracles(tmp_path_factory.mktemp("models"))
    yield oracles
    assert oracles.excused <= max(1, oracles.compared // 10_000), f"{oracles.excused} of {oracles.compared} excused"


def systems(cases: list[Case]) -> list[Any]:
    """The cases by the processes they need: what differs in choices only shares a running system."""
    groups: dict[tuple[str, tuple[int, int]], list[Case]] = {}
    for case in cases:
        groups.setdefault((case["family"], case["layout"]), []).append(case)
    return [
        pytest.param(family, layout, of_system, id=f"{family}-{layout[0]}x{layout[1]}")
        for (family, layout), of_system in sorted(groups.items())
    ]


def cover(families: tuple[str, ...]) -> list[Case]:
    """Any two settings meet, but that each family is divided in one way only."""
    cases = pairwise(SETTINGS | {"family": families, "layout": ((1, 1), *DIVIDED_LAYOUTS)})
    divided = dict(zip(families, cycle(DIVIDED_LAYOUTS), strict=False))
    return [each if each["layout"] == (1, 1) else each | {"layout": divided[each["family"]]} for each in cases]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "layout", "cases"), systems(cover(FAMILIES) + cover(ENCODER_DECODERS)))
async def test_output_equals_hugging_face(
    oracles: Oracles, family: str, layout: tuple[int, int], cases: list[Case]
) -> None:
    await check_system(oracles, family, layout, cases, stride=2, alone_stride=2)


@pytest.mark.prove
@pytest.mark.parametrize(("family", "layout", "cases"), systems(full(SETTINGS | {"family": ALL_FAMILIES})))
async def test_output_equals_hugging_face_in_every_combination(
    oracles: Oracles, family: str, layout: tuple[int, int], cases: list[Case]
) -> None:
    await check_system(oracles, family, layout, cases)


def strategy_of(case: Case) -> dict[str, Any]:
    """The options of a strategy: whole prompts, prompts in chunks, or encode and decode iterations by turns."""
    size = case["max_batch_size"]
    cycle = CycleControls(encode_batch=size, decode_steps=3, decode_batch=size, encode_tokens=90)
    return {"whole": {}, "chunks": {"max_batch_tokens": CHUNK_TOKENS}, "rra": {"cycle": cycle}}[case["strategy"]]


@pytest.mark.prove
@pytest.mark.parametrize("family", ALL_FAMILIES)
async def test_output_equals_hugging_face_with_few_layers_in_the_first_stage(oracles: Oracles, family: str) -> None:
    sizes = {"max_batch_size": (16, 3), "prefetch": (0, 1), "strategy": SETTINGS["strategy"]}
    await check_system(oracles, family, (2, 1), full(sizes), has_uneven_layers=True)


async def check_system(
    oracles: Oracles,
    family: str,
    layout: tuple[int, int],
    cases: list[Case],
    *,
    stride: int = 1,
    alone_stride: int = 1,
    has_uneven_layers: bool = False,
) -> None:
    """Serve the requests under each case, in the same processes, and compare every token.

    Args:
        stride: only every so many of them.
        alone_stride: of these, where each runs alone, which takes a step for each token.
        has_uneven_layers: the first of two stages has one layer, the second one has the others.
    """
    folder, all_works, all_references = oracles.of(family, stride)
    flags = {"layers": f"1,{load_model_info(folder).num_layers - 1}"} if has_uneven_layers else {}
    with RunningGroup(folder, stages=layout[0], tensor=layout[1], **flags) as group:
        for case in cases:
            choices = {name: case[name] for name in ("max_batch_size", "prefetch")} | strategy_of(case)
            apart = alone_stride if case["max_batch_size"] == 1 else 1
            works, references = all_works[::apart], all_references[::apart]
            outputs = await group.serve(works, **choices)
            verdict = Verdict()
            for number, (output, reference) in enumerate(zip(outputs, references, strict=True)):
                verdict.compare(f"request {number} under {choices}", output.ids, reference)
            assert not verdict.wrong, "\n".join(verdict.wrong)
            oracles.compared += verdict.compared
            oracles.excused += verdict.excused
