"""The `orca` command and the mistakes that `orca up` refuses before anything starts."""

import dataclasses
import fcntl
import importlib
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from orca.cli.main import COMMANDS, main
from orca.cli.small_model import small_model_folder
from orca.cli.up.local_resources import DataFolder, default_data_folder
from orca.cli.up.slo.settings import SloSettings
from orca.scheduler.policy.request_level import HABITS

OPEN = ("--open-to-network", "true")


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run `orca up` with flags it must refuse; returns what it said."""

    def run(*flags: str) -> str:
        assert main(["up", "--data", str(tmp_path / "data"), "--port", "0", *flags]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("orca up: ")
        assert said.err.count("\n") == 1
        return said.err.removeprefix("orca up: ").strip()

    return run


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:\n  up " in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_with_a_main(name: str) -> None:
    assert callable(importlib.import_module(COMMANDS[name].module).main)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fly"])
    assert ended.value.code == 2
    assert "invalid choice: 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--stages", "0"], "setting --stages: 0 is not 1 or more"),
        (["--tensor", "-1"], "setting --tensor: -1 is not 1 or more"),
        (["--replicas", "0"], "setting --replicas: 0 is not 1 or more"),
        (["--max-batch-size", "0"], "setting --max-batch-size: 0 is not 1 or more"),
        (["--slots", "15"], "setting --slots: 15 is not 16 or more"),
        (["--max-batch-tokens", "16"], "setting --max-batch-tokens: 16 is not above max_batch_size (16)"),
        (["--api-keys", " ,"], "setting --api-keys: ' ,' is not a comma-separated list of words"),
        (["--api-keys", ""], "setting --api-keys: '' is not a comma-separated list of words"),
        (["--port", "70000"], "setting --port: 70000 is not 65535 or less"),
        (["--port", "65535", "--gateways", "2"], "setting --port: 65535 is not 65534 or less, with 2 gateways"),
        (
            ["--policy", "request_level", "--without-habits", "haste"],
            f"setting --without-habits: ('haste',) is not of {' '.join(HABITS)}",
        ),
        (["--encode-batch", "4"], "setting --encode-batch: 4 is not for this policy: only for rra"),
        (["--policy", "rra", "--encode-batch", "4"], "setting --decode-steps: the policy rra needs it"),
        (
            ["--policy", "rra", "--encode-batch", "33", "--decode-steps", "4", "--stages", "2"],
            "setting --encode-batch: 33 is not at most 32, the number of stages (2) times max_batch_size (16)",
        ),
        (
            ["--policy", "rra", "--encode-batch", "4", "--decode-steps", "4", "--max-batch-tokens", "64"],
            "setting --max-batch-tokens: 64 is not for the policy rra",
        ),
        (["--served-name", ""], "setting --served-name: '' is not a name"),
        (["--stages", "two"], "setting --stages: 'two' is not a whole number"),
        (["--stages", "1.5"], "setting --stages: '1.5' is not a whole number"),
        (["--patience-s", "1.5"], "setting --patience-s: '1.5' is not a whole number of seconds"),
        (["--eta-percent", "0.75"], "setting --eta-percent: '0.75' is not a whole number"),
        (["--commit-interval-ms", "5ms"], "setting --commit-interval-ms: '5ms' is not a whole number of milliseconds"),
        (["--probe-s", "2s"], "setting --probe-s: '2s' is not a number of seconds"),
        (["--stages", "7"], "--stages 7 is more than the model's 6 layers"),
        (
            ["--model", "orca-restore", "--stages", "7"],
            "--stages 7 is more than the model's 6 layers (4 encoder, 2 decoder)",
        ),
        (
            ["--model", "orca-restore", "--slots", "31"],
            "--slots 31 is less than 32: source and target of a request have KV blocks of their own, of 16 slots each",
        ),
        (
            ["--model", "orca-restore", "--max-model-len", "2"],
            "max_model_len 2 is below 3, the tokens of the shortest request",
        ),
        (["--max-model-len", "1"], "max_model_len 1 is below 2, the tokens of the shortest request"),
        (
            ["--stages", "3", "--layers", "3,0,3"],
            (
                "setting --layers: '3,0,3' gives 0 layers to a stage: divide the model's 6 layers over 3 stages, "
                "at least one for each"
            ),
        ),
        (
            ["--layers", "3,3"],
            "setting --layers: '3,3' has 2 numbers: divide the model's 6 layers over 1 stage, at least one for each",
        ),
        (["--tensor", "7"], "--tensor 7 is more than the model's 6 attention heads"),
        (["--prefetch", "2"], "setting --prefetch: 2 is not 0 or 1"),
        (["--colour", "red"], "unrecognized arguments: --colour red (--help lists the options)"),
        (
            ["--model", "/no/such/folder"],
            (
                "--model /no/such/folder is neither a folder nor a model that ships with Orca "
                "(orca-austen, orca-restore) nor smollm2"
            ),
        ),
        ([*OPEN, "--host", "no.such.host.invalid"], "--host no.such.host.invalid is not an address"),
        # Of a range kept for documentation: no machine has it.
        (
            [*OPEN, "--host", "192.0.2.1"],
            "--host 192.0.2.1 --port 0: Cannot assign requested address; choose another with --host",
        ),
        (["--data", "/dev/null/x"], "--data: /dev/null/x/logs cannot be made: Not a directory"),
        (["--iteration-log", "/dev/null/x"], "--iteration-log: /dev/null/x cannot be made: Not a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_flag_is_refused_in_one_sentence(refused, flags: list[str], said: str) -> None:
    assert refused(*flags) == said


def test_an_empty_variable_of_keys_does_not_open_the_api(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCA_GATEWAY_API_KEYS", "")
    assert refused() == "setting ORCA_GATEWAY_API_KEYS: '' is not a comma-separated list of words"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ORCA_POOL_MAX_QUEUED", "abc", "setting ORCA_POOL_MAX_QUEUED: 'abc' is not a whole number"),
        ("ORCA_POOL_MAX_QUEUED", "0", "pool setting max_queued must be at least 1"),
        ("ORCA_GATEWAY_BODY_BYTES_MAX", "lots", "setting ORCA_GATEWAY_BODY_BYTES_MAX: 'lots' is not a whole number"),
        ("ORCA_SCHEDULER_MAX_BATCH", "1", "setting ORCA_SCHEDULER_MAX_BATCH: there is no such variable"),
        (
            "ORCA_SCHEDULER_PATIENCE_S",
            "1.5",
            "setting ORCA_SCHEDULER_PATIENCE_S: '1.5' is not a whole number of seconds",
        ),
        ("ORCA_SCHEDULER_LOG_FORMAT", "csv", "setting ORCA_SCHEDULER_LOG_FORMAT: 'csv' is not one of auto, json, text"),
        ("ORCA_WORKER_THREADS", "-1", "setting ORCA_WORKER_THREADS: -1 is not 0 or more"),
        ("ORCA_WORKER_THREADS", "two", "setting ORCA_WORKER_THREADS: 'two' is not a whole number"),
    ],
)
def test_a_bad_variable_of_a_part_is_refused_before_anything_is_made(
    refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert refused() == said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda file: None, "No such file or directory"),  # noqa: ARG005 - it is not there
        (Path.mkdir, "Is a directory"),
        (lambda file: file.write_bytes(b"\xff"), "is not text in UTF-8"),
        (lambda file: file.write_text("a-key"), "line 1: is not `name: sha256:<64 hex digits> [limit=N ..]`"),
    ],
    ids=["missing", "unreadable", "binary", "no hash"],
)
def test_a_file_of_keys_that_cannot_be_used_is_refused_before_anything_is_made(
    refused, tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(file := tmp_path / "keys")
    assert refused("--api-keys-file", str(file)) == f"setting api_keys_file: {file}: {said}"
    assert not (tmp_path / "data").exists()


def test_help_lists_the_settings_of_the_system_before_those_of_its_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    options = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    of_schedule = options[options.index("--slo-latency-ms") :]
    assert options[0] == "--model"
    assert len(of_schedule) == len(dataclasses.fields(SloSettings)) - 1, "max_batch_tokens has its own default"


def test_cuda_without_a_device_is_refused(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refused("--device", "cuda") == "--device cuda --tensor 1: 0 NVIDIA devices are visible"


def test_a_port_in_use_is_refused_by_its_number(refused) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = refused("--port", str(port))
    assert said == f"--host 127.0.0.1 --port {port}: Address already in use; choose another with --port"


def test_a_data_folder_that_another_supervisor_holds_is_refused(refused, tmp_path: Path) -> None:
    folder = tmp_path / "held"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert refused("--data", str(folder)) == f"{folder} is in use by another `orca up`; choose another --data"


def test_the_supervisor_that_holds_a_folder_is_named_with_its_pid_and_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with DataFolder(default_data_folder(8765), remedy="--port") as held:
        held.sign("http://127.0.0.1:8765")
        assert main(["up", "--port", "8765"]) == 2
    who = f"another `orca up` (pid {os.getpid()}, http://127.0.0.1:8765)"
    assert (
        capsys.readouterr().err
        == f"orca up: {tmp_path}/orca/8765 is in use by {who}; choose another --port or --data\n"
    )


def test_a_redis_that_does_not_answer_is_refused(refused, unused_tcp_port: int) -> None:
    said = refused("--redis-url", f"redis://127.0.0.1:{unused_tcp_port}/0")
    assert said.startswith(f"--redis-url redis://127.0.0.1:{unused_tcp_port}/0 does not answer: ")


def test_a_redis_url_with_a_password_is_refused_and_not_repeated(refused) -> None:
    said = refused("--redis-url", "redis://:secret@127.0.0.1:1/0")
    assert "redis://...@127.0.0.1:1/0: pool: its URL holds a user or password" in said
    assert "secret" not in said


def test_a_folder_without_a_model_is_refused_with_the_missing_file(refused, tmp_path: Path) -> None:
    assert refused("--model", str(tmp_path)) == f"{tmp_path} has no config.json"


def test_an_unknown_kind_of_model_is_refused_with_those_that_are_known(refused, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert refused("--model", str(tmp_path)).startswith(
        f"{tmp_path}/config.json: model_type 'mamba' is not one of gpt2"
    )


def test_a_model_given_as_a_file_is_refused(refused) -> None:
    file = small_model_folder() / "model.safetensors"
    assert refused("--model", str(file)) == f"--model {file} is a file; give a folder in Hugging Face layout"


def test_a_hub_name_without_a_network_is_refused_by_name(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refused("--model", "nobody/nothing-at-all")
    assert said.startswith("--model nobody/nothing-at-all is neither a folder nor a model that ships")
    assert ", and the hub could not provide it: " in said
