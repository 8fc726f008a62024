"""Reports on a plan on their way from a Job to the operator."""

import dataclasses

import pytest

from orca.core.plan_report import (
    TEXT_MAX,
    PlanReport,
    ReportedFigures,
    ReportedLengths,
    one_line,
    read_report,
    report_to_text,
)

LENGTHS = ReportedLengths(answers=0, prompt_mean=24.5, output_mean=11.0, output_p99=20)
REPORT = PlanReport(
    planned_lengths=LENGTHS,
    lengths=dataclasses.replace(LENGTHS, answers=300, output_mean=22.0),
    predicted=ReportedFigures(throughput=6.1, latency_s=None, ttft_s=0.5, tpot_s=None),
    is_met=False,
    is_infeasible=True,
    is_new=False,
    reason="it is the first plan",
    recommended=None,
)


@pytest.mark.parametrize(
    "report", [REPORT, dataclasses.replace(REPORT, predicted=None, recommended="rra, \u00e4")], ids=["figures", "none"]
)
def test_a_report_comes_as_it_was_given(report: PlanReport) -> None:
    assert read_report(report_to_text(report)) == report


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"is_new"', '"is_old"', "is_old is unknown"),
        ('"is_met": false', '"is_met": 0', "is_met must be true or false, not 0"),
        ("it is", "it\\nis", "reason must be one line of at most 1000 characters"),
        ('"recommended": null', '"recommended": ""', "recommended must be one line"),
        ("{", "[", "the report is no JSON"),
    ],
)
def test_anything_else_is_refused_by_its_field(old: str, new: str, said: str) -> None:
    text = report_to_text(REPORT)
    assert old in text
    with pytest.raises(ValueError, match=said):
        read_report(text.replace(old, new))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a plan", "a plan"),
        ("two\nlines\t and\x00 \u00a0more ", "two lines and more"),
        ("\u00e4" * TEXT_MAX, "\u00e4" * TEXT_MAX),
        ("x" * (TEXT_MAX + 1), "x" * (TEXT_MAX - 3) + "..."),
    ],
)
def test_a_text_for_people_is_one_line(text: str, line: str) -> None:
    assert one_line(text) == line
    assert dataclasses.replace(REPORT, reason=one_line(text)).reason == line
