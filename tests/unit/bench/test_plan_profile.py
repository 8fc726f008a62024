"""`orca bench plan profile`: the steps that it makes, and its tables."""

import multiprocessing
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from orca.bench.main import main as bench
from orca.bench.plan.profile_errors import LayoutErrors, TimedStep, figures, joined, lines, to_json
from orca.bench.plan.service_steps import ServiceSteps, StepKind, kind_of
from orca.bench.plan.wake_ups import WakeUps, measure_wake_ups
from orca.core.domain.encoder_decoder import EncoderDecoder
from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import SettingError
from orca.core.domain.model import ModelInfo
from orca.core.domain.request import Token
from orca.core.domain.step import Epoch, Part, Sampled, Step, StepResult

SHAPE = EngineShape(stages=1, slots=16_384, block_tokens=16, max_model_len=2048)
EPOCH = Epoch(1, "test")


def run(*, bursts: int, seed: int = 1, kind: EncoderDecoder | None = None) -> list[Step]:
    """Return the steps of some bursts, on an engine that draws token 7."""
    info = ModelInfo(
        folder=Path(),
        name="m",
        revision="r",
        architecture="llama",
        dtype="float32",
        vocab_size=97,
        max_model_len=2048,
        num_layers=4,
        bos_token_id=None,
        eos_token_ids=(),
        encoder_decoder=kind,
    )
    service, steps = ServiceSteps(info, SHAPE, EPOCH, Random(seed)), []
    for _ in range(bursts):
        for step in service.burst():
            steps.append(step)
            drawn = tuple(Sampled(row.handle, 0, Token(7)) for row in step.rows if row.sample)
            service.receive(StepResult(epoch=EPOCH, number=step.number, sampled=drawn))
    return steps


def test_bursts_have_steps_of_every_kind_and_all_requests_end() -> None:
    steps = run(bursts=40)
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    kinds = Counter(map(kind_of, steps))
    assert min(kinds[kind] for kind in StepKind) > 40, kinds
    assert {row.count for step in steps for row in step.rows if row.count > 1} - set(range(0, 2048, 16))
    freed = [handle for step in steps for handle in step.freed]
    assert len(freed) == len(set(freed)) > 0
    running = {new.handle for step in steps for new in step.new} - set(freed)
    assert running <= {row.handle for row in steps[-1].rows}, "only those of the last step are not freed yet"


def test_the_same_seed_makes_the_same_steps() -> None:
    assert run(bursts=3, seed=5) == run(bursts=3, seed=5) != run(bursts=3, seed=6)


def test_sources_of_an_encoder_decoder_model_enter_whole() -> None:
    steps = run(bursts=4, kind=EncoderDecoder(encoder_layers=2, start_token_id=0))
    entering = [step for step in steps if step.new]
    assert entering
    for step in entering:
        assert sum(row.part is Part.SOURCE for row in step.rows) == len(step.new)


def timed(kind: StepKind, measured_us: float, predicted_us: float) -> TimedStep:
    return TimedStep(kind=kind, rows=1, tokens=1, measured_us=measured_us, predicted_us=predicted_us)


ERRORS = LayoutErrors(
    model="m",
    ranks=2,
    threads=1,
    steps=[
        timed(StepKind.DECODE, 1000, 1010),
        timed(StepKind.DECODE, 1000, 970),
        timed(StepKind.DECODE, 1000, 1200),
        timed(StepKind.MIXED, 2000, 1900),
    ],
    spread=0.02,
    wake_ups=WakeUps(median_us=50, p90_us=4000),
)


def test_errors_are_shown_by_kind_of_step() -> None:
    shown = lines([ERRORS])
    decode = next(line.split() for line in shown if " decode " in line)
    assert decode == ["m", "2", "decode", "3", "1.00", "3.0%", "18.3%", "+1.0%"]
    every = next(line.split() for line in shown if " all " in line)
    assert every[3:] == ["4", "1.00", "4.0%", "17.7%", "-1.0%"]
    assert not any("prefill" in line for line in shown), "there was no such step"
    assert any("differ by 2.0%; a round trip between two processes takes 50 us, p90 4000 us" in line for line in shown)


def test_rounds_of_one_layout_are_joined() -> None:
    slow = WakeUps(median_us=500, p90_us=9000)
    whole = joined([replace(ERRORS, steps=ERRORS.steps[:1], spread=0.1, wake_ups=slow), ERRORS, ERRORS])
    assert (len(whole.steps), whole.spread, whole.wake_ups) == (9, 0.02, ERRORS.wake_ups)


def test_a_round_trip_takes_some_time_and_its_process_ends() -> None:
    found = measure_wake_ups()
    assert 0 < found.median_us <= found.p90_us
    assert not multiprocessing.active_children()


def test_errors_become_figures_and_json() -> None:
    found = {(each.what, each.settings.get("steps")): each for each in figures([ERRORS])}
    median = found["Error of predicted step times, median", "decode"]
    assert (median.value, median.unit, median.runs) == (3, "%", 3)
    assert median.settings == {"model": "m", "ranks": 2, "threads": 1, "steps": "decode"}
    assert found["Bias of predicted step times, median", "mixed"].value == -5
    assert found["Spread of the repeats of one step", None].value == 2
    assert found["Round trip between two processes, p90", None].value == 4000
    assert len(found) == 12
    assert to_json([ERRORS])[3] == {
        "model": "m",
        "ranks": 2,
        "threads": 1,
        "kind": "mixed",
        "rows": 1,
        "tokens": 1,
        "measured_us": 2000,
        "predicted_us": 1900,
    }


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["profile", "--steps", "0"], "--steps: 0 is not above 0"),
        (["profile", "--ranks", "x"], "argument --ranks: invalid"),
        (["profile", "--figures", "/no/such/folder/f"], "there is no folder /no/such/folder"),
        (["other"], "invalid choice: 'other'"),
        ([], "required: PART"),
        (["profile", "--", "--port", "1"], "does not start `orca up`"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(flags: list[str], said: str) -> None:
    with pytest.raises(SettingError, match=said.replace("(", r"\(")):
        bench(["plan", *flags])
