"""Frozen parts are detected and replaced. The part of the test answers when the test says so."""

import asyncio
from pathlib import Path

from orca.cli.up.probe import Probe, Silence
from support.cli.probed_parts import FakePart, probing, until

BOUND_S = 6.0


class Asked:
    """A part that is asked every 2 s: what is said of it after each question."""

    def __init__(self) -> None:
        self.silence = Silence(bound_s=BOUND_S)
        self.now_s = 100.0

    def question(self, *, is_answered: bool, took_s: float, pid: int | None = 7) -> bool:
        asked_s, self.now_s = self.now_s, self.now_s + took_s
        is_frozen = self.silence.record(pid, asked_s, self.now_s, is_answered=is_answered)
        self.now_s = max(self.now_s, asked_s + 2)
        return is_frozen

    def come_up(self) -> "Asked":
        assert not self.question(is_answered=True, took_s=0)
        return self


def test_no_answer_within_the_bound_is_a_freeze() -> None:
    asked = Asked().come_up()
    assert asked.silence.patience_s(asked.now_s) == BOUND_S
    assert asked.question(is_answered=False, took_s=BOUND_S)


def test_a_slow_answer_is_an_answer() -> None:
    asked = Asked().come_up()
    assert not any(asked.question(is_answered=True, took_s=5.9) for _ in range(20))


def test_a_part_that_refuses_its_connections_is_frozen_after_the_same_time() -> None:
    asked = Asked().come_up()
    assert [asked.question(is_answered=False, took_s=0) for _ in range(4)] == [False, False, False, True]
    assert asked.silence.patience_s(asked.now_s) == BOUND_S


def test_probes_after_the_first_are_waited_for_only_until_the_bound() -> None:
    asked = Asked().come_up()
    asked.question(is_answered=False, took_s=0)
    assert asked.silence.patience_s(asked.now_s) == BOUND_S - 2
    assert asked.question(is_answered=False, took_s=BOUND_S - 2)


def test_clock_rounding_does_not_delay_the_detection_of_a_freeze() -> None:
    """4.8 s and the bound make a time that is less than the bound behind 4.8 s."""
    start_s, bound_s = 4.8, 0.06
    silence = Silence(bound_s=bound_s)
    assert start_s + bound_s - start_s < bound_s
    silence.record(7, 0.0, start_s, is_answered=True)
    assert silence.record(7, start_s, start_s + bound_s, is_answered=False)


def test_an_answer_ends_the_silence() -> None:
    asked = Asked().come_up()
    for _ in range(5):
        assert not asked.question(is_answered=False, took_s=0)
        assert not asked.question(is_answered=False, took_s=0)
        assert not asked.question(is_answered=True, took_s=1)


def test_a_part_that_has_not_started_yet_may_be_silent_for_ever() -> None:
    asked = Asked()
    assert not any(asked.question(is_answered=False, took_s=BOUND_S) for _ in range(50))


def test_a_part_that_stays_frozen_gets_the_same_time_again() -> None:
    asked = Asked().come_up()
    assert asked.question(is_answered=False, took_s=BOUND_S)
    assert [asked.question(is_answered=False, took_s=0) for _ in range(4)] == [False, False, False, True]


def test_a_restarted_part_has_to_start_first() -> None:
    asked = Asked().come_up()
    assert not asked.question(is_answered=False, took_s=0)
    assert not asked.question(is_answered=False, took_s=0, pid=None)
    assert not any(asked.question(is_answered=False, took_s=BOUND_S, pid=8) for _ in range(10))


async def test_a_frozen_part_is_reported_with_its_bound_and_the_action(tmp_path: Path) -> None:
    part = FakePart(tmp_path)
    async with probing(part) as told:
        await until(lambda: part.asked >= 1)
        part.answers = False
        await until(lambda: told)
    assert told[0] == "worker-0.1 (pid 7) is frozen: it did not answer for 0.06 s; it is killed"
    assert part.unfrozen == len(told)


async def test_a_part_that_answers_is_not_killed(tmp_path: Path) -> None:
    part = FakePart(tmp_path)
    async with probing(part) as told:
        await until(lambda: part.asked >= 20)
    assert (told, part.unfrozen) == ([], 0)


async def test_a_freeze_of_the_supervisor_itself_blames_no_part(tmp_path: Path) -> None:
    part = FakePart(tmp_path)
    async with probing(part) as told:
        await until(lambda: part.asked >= 1)
        part.answers = None
        await until(lambda: part.asked >= 20)
    assert (told, part.unfrozen) == ([], 0)


async def test_a_period_of_zero_probes_nothing(tmp_path: Path) -> None:
    part = FakePart(tmp_path)
    await asyncio.wait_for(Probe([part], period_s=0.0, report=print).run(), 60)
    assert part.asked == 0
