"""The parts of the processor time that the rest of Orca takes, and where it matters."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from orca.cli.host_load import HostLoadFailed, _Service, is_needed, parts_of
from orca.core.process.ports import free_port
from orca.planner.profile.profile import ProcessorTime
from support.planner.profiles import key


def test_three_loads_give_the_three_parts() -> None:
    wanted = ProcessorTime(step_us=1_000, row_us=100, answer_us=3_000)
    few, many, short = ((rows, new, wanted.us(rows, new)) for rows, new in ((1, 0.01), (12, 0.1), (10, 2.5)))
    found = parts_of(few, many, short)
    assert (found.step_us, found.row_us, found.answer_us) == pytest.approx((1_000, 100, 3_000))


def test_no_part_is_below_0() -> None:
    found = parts_of((1, 0.0, 500.0), (12, 0.1, 400.0), (10, 2.5, 300.0))
    assert found == ProcessorTime(step_us=500.0, row_us=0.0, answer_us=0.0)


def test_loads_with_equal_rows_give_one_part() -> None:
    assert parts_of((1, 0.1, 50.0), (1, 0.1, 60.0), (1, 0.5, 70.0)) == ProcessorTime(
        step_us=0.0, row_us=60.0, answer_us=0.0
    )


def test_the_host_matters_only_where_ranks_leave_it_no_processor() -> None:
    full = key()  # two devices of one thread on two processors
    assert is_needed(full)
    assert not is_needed(replace(full, processors=3))
    assert not is_needed(replace(full, devices=1))
    assert is_needed(replace(full, devices=1, threads=2))
    assert not is_needed(replace(full, device="cuda"))


class FailingService(_Service):
    """A service whose requests have failed."""

    @contextmanager
    def _load(self, streams: int, new_tokens: int) -> Iterator[list[str]]:  # noqa: ARG002
        yield ["HTTP Error 503"]


def test_a_load_whose_requests_fail_measures_nothing_however_many_steps_there_are(tmp_path: Path) -> None:
    log = tmp_path / "scheduler-0.jsonl"
    later_ns = time.monotonic_ns() + 10**12
    log.write_text("".join(json.dumps({"rows": [["r"]], "returned_ns": later_ns}) + "\n" for _ in range(50)))
    with pytest.raises(HostLoadFailed, match="a request failed: HTTP Error 503"):
        FailingService("", os.getpid(), log, 64).sample(2, 4, 0.0)


def test_a_service_that_is_gone_is_reported(tmp_path: Path) -> None:
    service = _Service(f"http://127.0.0.1:{free_port()}", os.getpid(), tmp_path / "log", 64)
    with pytest.raises(HostLoadFailed, match="does not tell its model"):
        service.sample(2, 4, 0.0)
