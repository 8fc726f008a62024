"""The simulated engine in real time, where the loop may come late, and the steps with sources that it accepts.

Most tests of the loop run it on virtual time.
"""

import time
from dataclasses import replace

import pytest

from orca.bench.parts.stage_processes import new_request
from orca.core.domain.engine import EngineShape
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Claim, Epoch, NewRequest, Part, Row, Step
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.simulated_engine import SimulatedEngine
from orca.scheduler.engines.step_cost import LinearCost
from support.worker.engine_builders import next_result

EPOCH = Epoch(1, "test")
SHAPE = EngineShape(stages=1, slots=64, block_tokens=16, max_model_len=64)


async def test_a_step_that_is_due_at_once_does_not_overtake_the_one_whose_timer_is_late() -> None:
    engine = SimulatedEngine(SHAPE, cost=LinearCost(step_us=1_000))
    await engine.form(EPOCH)
    new = new_request(1, (5, 6), 1)
    await engine.submit(Step(epoch=EPOCH, number=1, new=(new,), rows=(Row(handle=1, start=0, count=2, sample=True),)))
    time.sleep(0.005)  # noqa: ASYNC251 - the loop is busy for longer than the step
    await engine.submit(Step(epoch=EPOCH, number=2, freed=(1,)))
    assert [(await next_result(engine, limit_s=10)).number for _ in range(2)] == [1, 2]


NEW = NewRequest(
    handle=1,
    request_id="A.0",
    claim=Claim(1, "c"),
    tokens=(5, 6, 7, 8),  # a source of three tokens and a log of one
    prompt_length=3,
    max_total_tokens=10,  # the target has room for seven
    sampling=SamplingParams(),
    decoder_prefix=(0, 2),
    max_new_tokens=5,
)
SOURCE = Row(1, 0, 3, False, part=Part.SOURCE)
BEGINNING = Row(1, 0, 3, True, part=Part.TARGET)
ENTRY = Step(epoch=EPOCH, number=1, new=(NEW,), rows=(SOURCE, BEGINNING))
OTHER = replace(NEW, handle=2, request_id="B.0")
LONG = replace(NEW, tokens=(5,) * 5000, prompt_length=5000, max_total_tokens=5007)


def increment(number: int) -> Step:
    return Step(epoch=EPOCH, number=number, rows=(Row(1, number + 1, 1, True, part=Part.TARGET),))


def with_rows(*rows: Row, new: tuple[NewRequest, ...] = (NEW,)) -> Step:
    return replace(ENTRY, new=new, rows=rows)


def play(*steps: Step) -> None:
    """Run the steps. Raises: AssertionError if one breaks the contract."""

    async def run() -> None:
        engine = SimulatedEngine(EngineShape(stages=1, slots=16_384, block_tokens=16, max_model_len=16_384))
        await engine.form(EPOCH)
        for step in steps:
            await engine.submit(step)

    virtual_time.run(run())


def test_a_source_and_its_target_run_to_the_length_of_the_target() -> None:
    play(ENTRY, *map(increment, range(2, 6)))


def test_a_repeated_position_is_no_second_entry() -> None:
    new = replace(NEW, tokens=(5, 6, 7), decoder_prefix=(0,))
    first = replace(BEGINNING, count=1)
    again = Step(epoch=EPOCH, number=2, rows=(replace(first, sample=False),))
    play(with_rows(SOURCE, first, new=(new,)), again)


MUTANTS: dict[str, tuple[list[Step], str]] = {
    "source left out": ([with_rows(BEGINNING)], "a target without its source"),
    "source twice in a step": ([with_rows(SOURCE, SOURCE, BEGINNING)], "two rows of one request"),
    "source run again": (
        [ENTRY, Step(epoch=EPOCH, number=2, rows=(SOURCE, Row(1, 3, 1, True, part=Part.TARGET)))],
        "a source runs twice",
    ),
    "source without target": ([with_rows(SOURCE)], "a source without the first row of its target"),
    "source one step early": (
        [with_rows(SOURCE), Step(epoch=EPOCH, number=2, rows=(BEGINNING,))],
        "a source without the first row of its target",
    ),
    "source cut": ([with_rows(replace(SOURCE, count=2), BEGINNING)], "a source that is not whole"),
    "source and log": ([with_rows(replace(SOURCE, count=4), BEGINNING)], "a source that is not whole"),
    "source from position 1": ([with_rows(replace(SOURCE, start=1), BEGINNING)], "a source that is not whole"),
    "source draws": ([with_rows(replace(SOURCE, sample=True), BEGINNING)], "a source draws a token"),
    "source with a token": ([with_rows(replace(SOURCE, token=5), BEGINNING)], "a source has an input token"),
    "target before source": ([with_rows(BEGINNING, SOURCE)], "a source row after a target row"),
    "sources around a target": (
        [with_rows(SOURCE, BEGINNING, replace(SOURCE, handle=2), replace(BEGINNING, handle=2), new=(NEW, OTHER))],
        "a source row after a target row",
    ),
    "no part": ([with_rows(SOURCE, replace(BEGINNING, part=Part.UNSPECIFIED))], "a row of another part"),
    "part of a decoder-only model": (
        [with_rows(replace(BEGINNING, count=4), new=(replace(NEW, decoder_prefix=(), max_new_tokens=None),))],
        "a row of another part",
    ),
    "source of a decoder-only model": (
        [with_rows(SOURCE, BEGINNING, new=(replace(NEW, decoder_prefix=(), max_new_tokens=None),))],
        "a source row with a decoder-only model",
    ),
    "target from the position of its source": (
        [with_rows(SOURCE, replace(BEGINNING, start=3))],
        "a row leaves a gap",
    ),
    "target leaves a gap": ([ENTRY, replace(increment(3), number=2)], "a row leaves a gap"),
    "prefix lost": ([with_rows(SOURCE, replace(BEGINNING, count=1))], "a token is drawn too early"),
    "target past its table": ([ENTRY, *map(increment, range(2, 7))], "a row past the slots reserved"),
    "target table too short": (
        [with_rows(SOURCE, BEGINNING, new=(replace(NEW, max_total_tokens=9),))],
        "more target tokens than reserved",
    ),
    "no length of the log": (
        [with_rows(SOURCE, BEGINNING, new=(replace(NEW, max_new_tokens=None),))],
        "the length of a log is given for targets alone",
    ),
    "too many source tokens": (
        [
            with_rows(
                replace(SOURCE, count=5000),
                replace(SOURCE, handle=2, count=5000),
                BEGINNING,
                replace(BEGINNING, handle=2),
                new=(LONG, replace(LONG, handle=2)),
            )
        ],
        "more sources than a stage has room for",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_step_that_breaks_the_contract_of_sources_is_found(mutant: str) -> None:
    steps, reason = MUTANTS[mutant]
    with pytest.raises(AssertionError, match=reason):
        play(*steps)


def test_a_source_longer_than_the_memory_of_a_stage_runs_alone() -> None:
    long = replace(LONG, tokens=(5,) * 9000, prompt_length=9000, max_total_tokens=9007)
    play(with_rows(replace(SOURCE, count=9000), replace(BEGINNING, count=2), new=(long,)))


@pytest.mark.parametrize(("slots", "is_enough"), [(32, True), (16, False)])
def test_both_block_tables_count_for_the_slots_in_use(slots: int, is_enough: bool) -> None:
    async def run() -> int:
        engine = SimulatedEngine(EngineShape(stages=1, slots=slots, block_tokens=16, max_model_len=64))
        await engine.form(EPOCH)
        await engine.submit(ENTRY)
        return engine.slots_in_use

    if is_enough:
        assert virtual_time.run(run()) == 32
    else:
        with pytest.raises(AssertionError, match="more slots are in use"):
            virtual_time.run(run())
