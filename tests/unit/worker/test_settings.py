"""worker.settings and worker.service: flags over variables over defaults; a bad one stops the start by its name."""

import dataclasses

import pytest

from orca.core.domain.errors import SettingError
from orca.worker.service import main
from orca.worker.settings import WorkerSettings, parse_settings


def test_flags_override_variables_and_variables_override_defaults() -> None:
    variables = {"ORCA_WORKER_MODEL": "/models/a", "ORCA_WORKER_STAGES": "4", "ORCA_WORKER_TENSOR": "2", "HOME": "/"}
    settings = parse_settings(["--stages", "3", "--memory-share", "0.25"], variables)
    expected = dataclasses.replace(WorkerSettings(model="/models/a"), stages=3, tensor=2, memory_share=0.25)
    assert settings == expected


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--stage", "2", "--stages", "2"], "stage"),
        (["--stages", "0"], "stages"),
        (["--tensor", "two"], "tensor"),
        (["--dtype", "int8"], "dtype"),
        (["--quantization", "int3"], "--quantization: 'int3' is not one of int8"),
        (["--quantization", "int8", "--device", "cuda"], "--quantization"),
        (["--link", "mpi"], "link"),
        (["--link", "nccl"], "link"),
        (["--device", "tpu"], "device"),
        (["--memory-share", "1.5"], "--memory-share"),
        (["--slots-max", "0"], "--slots-max"),
        (["--rank-silent-s", "0"], "--rank-silent-s"),
        (["--loading-silent-s", "0"], "--loading-silent-s"),
        (["--listen", "7000"], "listen"),
        (["--delay-ms", "-1"], "--delay-ms"),
        (["--max-model-len", "0"], "--max-model-len"),
    ],
)
def test_a_bad_setting_is_refused_by_name(flags: list[str], name: str) -> None:
    with pytest.raises(SettingError, match=f"setting.*{name}"):
        parse_settings(["--model", "/m", *flags], {})


def test_an_unknown_flag_is_refused_with_a_pointer_to_the_help() -> None:
    with pytest.raises(SettingError, match=r"unrecognized arguments: --unheard-of 1 \(--help lists the options\)"):
        parse_settings(["--model", "/m", "--unheard-of", "1"], {})


def test_a_misspelt_variable_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match="ORCA_WORKER_STAGE5"):
        parse_settings(["--model", "/m"], {"ORCA_WORKER_STAGE5": "2"})


def test_a_stage_without_a_model_does_not_start() -> None:
    with pytest.raises(SettingError, match="setting model: required"):
        parse_settings([], {})


def test_a_bad_setting_ends_the_service_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/m", "--stages", "0"]) == 2
    assert capsys.readouterr().err == "setting --stages: 0 is not 1 or more\n"


def test_a_bad_variable_is_refused_by_its_spelling() -> None:
    with pytest.raises(SettingError, match=r"^setting ORCA_WORKER_STAGES: 0 is not 1 or more$"):
        parse_settings(["--model", "/m"], {"ORCA_WORKER_STAGES": "0"})
    with pytest.raises(SettingError, match=r"^setting --stages: -1 is"):
        parse_settings(["--model", "/m", "--stages", "-1"], {"ORCA_WORKER_STAGES": "0"})


def test_a_missing_network_interface_stops_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/m", "--network-interface", "none0"]) == 2
    assert "--network-interface: 'none0' is not an interface of this machine: lo" in capsys.readouterr().err


def test_every_setting_has_a_line_of_help() -> None:
    for field in dataclasses.fields(WorkerSettings):
        assert len(field.metadata["help"]) > 10, field.name
