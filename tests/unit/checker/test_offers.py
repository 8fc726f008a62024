"""The recorder's lines show stale work."""

import json
from pathlib import Path
from typing import Any

from checker.history.offers import judge_offers, read_offers
from checker.rules.evidence import Evidence
from checker.rules.system import stale_work_is_refused


def claimed(at: float, claim: int, process: str = "scheduler-1") -> dict[str, Any]:
    return {"what": "claimed", "process": process, "at": at, "request": "r.0", "claim": claim}


def committed(at: float, claim: int, answer: str) -> dict[str, Any]:
    line = {"what": "committed", "process": "scheduler-1", "at": at, "request": "r.0", "claim": claim}
    return line | {"index": 4, "tokens": 1, "answer": answer}


def joined(at: float, epoch: int) -> dict[str, Any]:
    return {"what": "joined", "process": "worker-1", "at": at, "stage": 0, "epoch": epoch}


def step(at: float, epoch: int, number: int, *, ran: bool = True) -> dict[str, Any]:
    line = {"what": "step", "process": "worker-1", "at": at, "stage": 0, "holder": "h"}
    return line | {"epoch": epoch, "step": number, "ran": ran}


def test_a_commit_after_a_later_claim_is_stale_and_harmless_if_refused() -> None:
    offers = judge_offers(
        [claimed(1, 1), claimed(5, 3), committed(4, 1, "applied"), committed(6, 1, "not yours")], at=9
    )
    assert (offers.counts["stale commits offered"], offers.harmful) == (1, ())


def test_a_stale_commit_that_was_applied_is_a_violation() -> None:
    offers = judge_offers([claimed(1, 1), claimed(5, 3), committed(6, 1, "applied")], at=9)
    assert offers.counts["stale commits applied"] == 1
    [violation] = stale_work_is_refused(Evidence(offers=offers))
    assert violation.found == "commit of r.0 at 4 by claim 1, which was over"


def test_a_step_of_an_epoch_that_the_stage_has_left_must_not_run() -> None:
    refused = judge_offers([joined(1, 1), joined(5, 2), step(2, 1, 1), step(6, 1, 2, ran=False)], at=9)
    assert (refused.counts["stale steps offered"], refused.harmful) == (1, ())
    taken = judge_offers([joined(1, 1), joined(5, 2), step(6, 1, 2)], at=9)
    assert taken.harmful == ("step 2 of epoch 1 ran on worker-1, which had joined a later one",)


def test_a_step_that_ran_twice_is_a_violation_but_not_one_offered_twice() -> None:
    offered = judge_offers([step(2, 1, 1), step(3, 1, 1, ran=False)], at=9)
    assert offered.harmful == ()
    ran = judge_offers([step(2, 1, 1), step(3, 1, 1)], at=9)
    assert ran.harmful == ("step 1 of epoch 1 ran twice on worker-1",)


def test_lines_are_read_by_process_and_a_truncated_one_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    whole = json.dumps(step(2, 1, 1))
    (tmp_path / "records" / "worker-7.jsonl").write_text(f'{whole}\n{{"what": "st')
    offers = read_offers(tmp_path, at=9)
    assert offers is not None
    assert offers.counts == {"steps run": 1, "stale steps offered": 0}


def test_without_a_recorder_there_is_no_verdict(tmp_path: Path) -> None:
    assert read_offers(tmp_path, at=9) is None
