"""`orca bench exegpt table7 --real`: iterations from the logs of real stages, and the controls that run there."""

from orca.bench.exegpt.real_variance import DECODE_STEPS, ENCODE_BATCH, controls_of, iteration_times


def step(begin_ms: int, took_ms: int, *, is_encode: bool = False, rows: int = 1) -> dict[str, object]:
    return {
        "handles": list(range(rows)),
        "new": ["a.0"] if is_encode else [],
        "start_ns": begin_ms * 10**6,
        "end_ns": (begin_ms + took_ms) * 10**6,
    }


def test_the_micro_batches_of_an_iteration_count_together() -> None:
    steps = [
        *(step(0, 40, is_encode=True), step(50, 60, is_encode=True)),
        *(step(110, 5), step(120, 7), step(130, 0, rows=0), step(131, 4), step(140, 6)),
    ]
    found = iteration_times(steps, stages=2, decode_steps=2)
    assert [is_encode for is_encode, _ in found] == [True, False, False]
    assert [round(time_s, 6) for _, time_s in found] == [0.1, 0.012, 0.01]


def test_a_cycle_without_a_step_of_each_micro_batch_is_left_out() -> None:
    whole = [step(0, 1, is_encode=True), step(1, 1, is_encode=True), step(2, 1), step(3, 1)]
    part = [step(4, 9, is_encode=True), step(5, 9), step(6, 9)]
    assert len(iteration_times([*part, *whole, *part, *whole], stages=2, decode_steps=1)) == 4
    assert iteration_times([step(0, 1), *part], stages=2, decode_steps=1) == []


def test_the_schedule_is_a_quarter_of_row_3() -> None:
    assert (ENCODE_BATCH, DECODE_STEPS) == (13, 3)
    plain, adjusted = controls_of(0.25, is_adjusted=False), controls_of(0.25, is_adjusted=True)
    assert (plain.encode_batch, plain.decode_batch, plain.encode_tokens) == (13, None, None)
    assert adjusted.decode_batch is not None
    # An answer of 8 tokens on average decodes in two to three phases of three.
    assert 2 * 13 < adjusted.decode_batch < 4 * 13
    assert adjusted.encode_tokens is not None
    assert 13 * 32 < adjusted.encode_tokens < 13 * 96
    assert adjusted.threshold_percent > 12
