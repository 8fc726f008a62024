"""The options `--slo-...` of `orca up`: what they mean, and which of them contradict each other."""

from pathlib import Path

import pytest

from orca.cli.main import main
from orca.cli.up.settings import UpSettings, parse_settings
from orca.core.domain.errors import SettingError
from orca.core.process.settings import with_texts


def test_the_options_become_a_goal() -> None:
    flags = "--slo-latency-ms 8000 --slo-percentile 95 --slo-ttft-ms 500 --slo-tpot-ms 90 --slo-margin-percent 10"
    goal = parse_settings(flags.split()).slo_goal()
    assert (goal.latency_ms, goal.percentile, goal.kind) == (8000, 95, "sequence")
    assert (goal.ttft_ms, goal.tpot_ms, goal.margin_percent) == (500, 90, 10)
    assert parse_settings(["--slo-latency-ms=1"]).slo_goal().percentile == 99


def test_without_a_bound_nothing_changes() -> None:
    assert parse_settings([]).slo_latency_ms is None
    assert parse_settings(["--slo-enforce"]).slo_enforce
    with pytest.raises(SettingError, match="setting --encode-batch: the policy rra needs it"):
        parse_settings(["--policy", "rra"])


def test_the_policy_rra_gets_its_controls_from_the_plan() -> None:
    assert parse_settings(["--policy", "rra", "--slo-latency-ms", "10"]).encode_batch is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--slo-latency-ms 0", "setting --slo-latency-ms: 0 is not above 0"),
        ("--slo-latency-ms -5", "setting --slo-latency-ms: -5 is not above 0"),
        ("--slo-latency-ms nan", "setting --slo-latency-ms: nan is not a number"),
        ("--slo-latency-ms inf", "setting --slo-latency-ms: inf is not a number"),
        ("--slo-latency-ms soon", "setting --slo-latency-ms: 'soon' is not a number"),
        ("--slo-latency-ms 9 --slo-percentile 49", "setting --slo-percentile: 49 is not"),
        ("--slo-latency-ms 9 --slo-percentile 100", "setting --slo-percentile: 100 is not"),
        ("--slo-latency-ms 9 --slo-percentile 99.5", "setting --slo-percentile: '99.5' is not"),
        ("--slo-latency-ms 9 --slo-ttft-ms 0", "setting --slo-ttft-ms: 0 is not above 0"),
        ("--slo-latency-ms 9 --slo-tpot-ms -1", "setting --slo-tpot-ms: -1 is not above 0"),
        ("--slo-latency-ms 9 --slo-tpot-ms inf", "setting --slo-tpot-ms: inf is not a number"),
        ("--slo-latency-ms 9 --slo-margin-percent 100", "setting --slo-margin-percent: 100 is not"),
        ("--slo-latency-ms 9 --slo-margin-percent -1", "setting --slo-margin-percent: -1"),
        ("--slo-latency-ms 9 --slo-devices 0", "setting --slo-devices: 0 is not 1 or more"),
        ("--slo-latency-ms 9 --policy request_level", "setting --policy: "),
        ("--slo-latency-ms 9 --slo-workload 3/4 --slo-lengths x", "setting --slo-lengths: --slo-workload gives"),
        ("--slo-latency-ms 9 --plan p.json", "setting --plan: "),
        ("--slo-latency-ms 9 --max-batch-size 4", "setting --max-batch-size: the plan for --slo-latency-ms decides it"),
        ("--slo-latency-ms 9 --max-batch-tokens=0", "setting --max-batch-tokens: the plan"),
        ("--slo-latency-ms=9 --policy rra --encode-batch 4", "setting --encode-batch: the plan"),
        ("--slo-latency-ms=9 --policy rra --decode-steps 4", "setting --decode-steps: the plan"),
        ("--slo-percentile 99", "setting --slo-percentile: it needs a latency bound, --slo-latency-ms"),
        ("--slo-devices=2", "setting --slo-devices: it needs a latency bound"),
        ("--slo-workload 3/4", "setting --slo-workload: it needs a latency bound"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", *flags.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--slo-workload 3", "setting --slo-workload: lengths are PROMPT/OUTPUT"),
        ("--slo-workload 400/400", "setting --slo-workload: the workload (400 in, 400 out) has requests of up to 800"),
        ("--slo-lengths none.csv", "setting --slo-lengths: none.csv cannot be read"),
        ("--slo-profile none.json", "setting --slo-profile: profile none.json cannot be read"),
        ("--slo-devices 100000", "setting --slo-devices: 100000 is more than the"),
        ("--slo-devices 1 --stages 2", "setting --slo-devices: --stages 2 need 2 devices, and there are 1"),
        ("--layers 3,3", "setting --layers:"),
    ],
)
def test_what_does_not_fit_the_model_or_the_machine_is_refused_before_anything_starts(
    tmp_path: Path, flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    assert main(["up", "--data", str(data), "--port", "0", "--slo-latency-ms", "9", *flags.split()]) == 2
    assert said in capsys.readouterr().err
    assert not data.exists()


def test_settings_made_in_code_are_checked_too() -> None:
    with pytest.raises(SettingError, match="slo_percentile"):
        UpSettings(slo_latency_ms=9, slo_percentile=10)


def test_texts_replace_fields_under_the_same_rules() -> None:
    settings = with_texts(parse_settings(["--port", "9"]), {"stages": "2", "layers": "4,2", "max_batch_tokens": "0"})
    assert (settings.port, settings.stages, settings.layers, settings.max_batch_tokens) == (9, 2, "4,2", 0)
    for texts, said in [
        ({"stages": "0"}, "setting --stages: 0 is not 1 or more"),
        ({"stages": "two"}, "setting --stages: 'two' is not a whole number"),
        ({"decode_steps": "3"}, "setting --decode-steps: 3 is not for this policy"),
    ]:
        with pytest.raises(SettingError, match=said):
            with_texts(settings, texts)
