"""A scheduler reports that its group has not formed."""

import logging

import pytest

from orca.core.domain.step import Epoch
from orca.scheduler.formation_watch import FormationWatch
from orca.scheduler.observer import Observers

EPOCH = Epoch(1, "p")


class Watched:
    """A formation on a clock of its own, heard through Observers as in the process."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.formation = FormationWatch(30.0, lambda: self.now_s)
        self.told = Observers((self.formation,))

    def after(self, seconds: float) -> float:
        self.now_s += seconds
        self.formation.poll()
        return self.formation.unformed_s()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_long_first_start_is_a_warning(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    assert watched.after(29) == 29
    assert caplog.records == []
    watched.after(1)
    assert caplog.records[0].levelno == logging.WARNING
    assert "not been formed for 30 s: it forms for the first time" in caplog.text


def test_a_group_that_stays_broken_is_an_error_with_its_reason(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.told.formed(EPOCH, 16, "")
    assert watched.after(1000) == 0
    watched.told.broke(EPOCH, "stage 1 is gone")
    watched.after(10)
    watched.told.broke(EPOCH, "stage 1 does not answer")
    assert watched.after(20) == 30
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.ERROR,
        "the group has not been formed for 30 s: stage 1 does not answer",
    )


def test_the_message_is_repeated_whenever_the_time_has_doubled(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(250):
        watched.after(1)
    assert [record.getMessage().split()[7] for record in caplog.records] == ["30", "60", "120", "240"]


def test_a_group_that_has_formed_again_restarts_the_time(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.after(40)
    watched.told.formed(EPOCH, 16, "")
    watched.told.broke(EPOCH, "a rank died")
    watched.after(29)
    assert len(caplog.records) == 1
    watched.after(1)
    assert len(caplog.records) == 2


def test_a_standby_reports_no_missing_group(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        watched.told.stood_by()
        watched.after(1)
    assert caplog.records == []


def test_readiness_follows_the_formed_group_and_gives_the_reason_otherwise(watched: Watched) -> None:
    assert watched.formation.ready_page().status == 503
    watched.told.formed(EPOCH, 16, "")
    assert watched.formation.ready_page().status == 200
    watched.told.broke(EPOCH, "stage 1 is gone")
    watched.after(7)
    page = watched.formation.ready_page()
    assert (page.status, page.body) == (503, b'{"ready":false,"for_seconds":7,"reason":"stage 1 is gone"}')


def test_a_standby_is_not_ready(watched: Watched) -> None:
    watched.told.stood_by()
    assert watched.formation.ready_page().status == 503
