"""Models of a hub: the library and the process are the real ones, the hub is a small one on loopback."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fetch.fetching import CONFIG, FetchProcess, contents, model_files
from support.fetch.small_hub import TOKEN, SmallHub, running

MEGABYTE = 1 << 20


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    with running(SmallHub(model_files())) as started:
        yield started


def fetch(hub: SmallHub, into: Path, *options: str, name: str = "owner/name", token: str = "") -> FetchProcess:
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token}
    return FetchProcess(f"hf://{name}", into, variables, *options)


def test_a_model_is_fetched_completely_without_unneeded_files(hub: SmallHub, tmp_path: Path) -> None:
    left = {
        "own.py": b"code",
        "pytorch_model.bin": b"pickle",
        "onnx/config.json": b"{}",
        "consolidated.safetensors": b"x",
    }
    hub.files |= left
    hub.said |= left
    fetch(hub, tmp_path / "model").succeed()
    assert contents(tmp_path / "model") == model_files()
    assert not hub.sent.keys() & left.keys()


def test_a_second_start_makes_no_call(hub: SmallHub, tmp_path: Path) -> None:
    fetch(hub, tmp_path / "model").succeed()
    hub.is_down = True
    fetch(hub, tmp_path / "model").succeed()


def test_a_killed_fetch_continues_without_fetching_a_byte_twice(hub: SmallHub, tmp_path: Path) -> None:
    hub.cut_after, hub.hangs = {"model.safetensors": 2 * MEGABYTE}, True
    first = fetch(hub, tmp_path / "model")
    first.wait_for_bytes(2 * MEGABYTE)
    first.kill()
    assert not (tmp_path / "model").exists()
    fetch(hub, tmp_path / "model").succeed()
    assert contents(tmp_path / "model") == model_files()
    assert hub.sent == {name: len(content) for name, content in model_files().items()}


def test_two_fetches_into_one_volume_take_turns(hub: SmallHub, tmp_path: Path) -> None:
    hub.cut_after, hub.hangs = {"model.safetensors": MEGABYTE}, True
    first = fetch(hub, tmp_path / "model")
    first.wait_for_bytes(MEGABYTE)
    second = fetch(hub, tmp_path / "model")
    assert second.progress()["bytes_done"] == 0
    first.kill()
    second.succeed()
    assert hub.sent == {name: len(content) for name, content in model_files().items()}


def test_a_fetch_ends_at_once_on_sigterm_and_may_be_retried(hub: SmallHub, tmp_path: Path) -> None:
    hub.cut_after, hub.hangs = {"model.safetensors": MEGABYTE}, True
    process = fetch(hub, tmp_path / "model")
    process.wait_for_bytes(MEGABYTE)
    assert process.terminate() == (1, "ended by SIGTERM; the next start resumes from here")


def test_a_broken_connection_is_resumed_at_its_offset(hub: SmallHub, tmp_path: Path) -> None:
    hub.cut_after = {"model.safetensors": MEGABYTE}
    fetch(hub, tmp_path / "model").succeed()
    assert hub.sent["model.safetensors"] == len(model_files()["model.safetensors"])


def test_a_hub_without_ranges_is_read_again_from_the_start(hub: SmallHub, tmp_path: Path) -> None:
    hub.cut_after, hub.knows_ranges = {"model.safetensors": MEGABYTE}, False
    fetch(hub, tmp_path / "model").succeed()
    assert contents(tmp_path / "model") == model_files()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_differs_from_its_digest_is_broken_and_never_seen(hub: SmallHub, tmp_path: Path, name: str) -> None:
    hub.files[name] = hub.files[name][:-1] + b"!"
    code, said = fetch(hub, tmp_path / "model").end()
    assert (code, said.startswith(f"ModelBroken: hf://owner/name: {name} does not match")) == (2, True), said
    assert not (tmp_path / "model").exists()


def test_files_damaged_by_a_power_loss_are_fetched_again(hub: SmallHub, tmp_path: Path) -> None:
    hub.cut_after, hub.hangs = {"model.safetensors": 2 * MEGABYTE}, True
    first = fetch(hub, tmp_path / "model")
    first.wait_for_bytes(2 * MEGABYTE)
    first.kill()
    [part] = tmp_path.glob(".model.*/model.safetensors.part")
    part.write_bytes(bytes(MEGABYTE))
    fetch(hub, tmp_path / "model").succeed()
    assert contents(tmp_path / "model") == model_files()


@pytest.mark.parametrize(("name", "options"), [("owner/other", ()), ("owner/name", ("--revision", "v9"))])
def test_an_unknown_model_or_revision_is_missing(
    hub: SmallHub, tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    code, said = fetch(hub, tmp_path / "model", *options, name=name).end()
    assert (code, said.partition(":")[0]) == (2, "ModelMissing")


def test_a_gated_model_needs_its_token(hub: SmallHub, tmp_path: Path) -> None:
    hub.needs_token = True
    code, said = fetch(hub, tmp_path / "model").end()
    assert (code, said.partition(":")[0]) == (2, "ModelDenied")
    fetch(hub, tmp_path / "model", token=TOKEN).succeed()


def test_an_unavailable_hub_may_be_retried(hub: SmallHub, tmp_path: Path) -> None:
    hub.is_down = True
    code, said = fetch(hub, tmp_path / "model").end()
    assert (code, said.partition(":")[0]) == (1, "ModelUnreachable")


def test_an_unreachable_host_may_be_retried(tmp_path: Path) -> None:
    nowhere = SmallHub({})
    nowhere.url = "http://127.0.0.1:9"
    code, said = fetch(nowhere, tmp_path / "model").end()
    assert (code, said.partition(":")[0]) == (1, "ModelUnreachable")


def test_a_repository_of_pickles_is_broken_before_a_byte_is_fetched(tmp_path: Path) -> None:
    files = {"config.json": json.dumps(CONFIG).encode(), "pytorch_model.bin": b"pickle"}
    with running(SmallHub(files)) as hub:
        code, said = fetch(hub, tmp_path / "model").end()
        assert (code, "only pickled weights (pytorch_model.bin)" in said, hub.sent) == (2, True, {})


def test_a_model_of_an_unknown_kind_is_broken_before_its_weights_are_fetched(tmp_path: Path) -> None:
    with running(SmallHub(model_files() | {"config.json": b'{"model_type": "martian"}'})) as hub:
        code, said = fetch(hub, tmp_path / "model").end()
        assert (code, "'martian'" in said, list(hub.sent)) == (2, True, ["config.json"])


def test_a_model_without_a_tokenizer_is_broken(tmp_path: Path) -> None:
    files = {name: content for name, content in model_files().items() if name != "tokenizer.json"}
    with running(SmallHub(files)) as hub:
        code, said = fetch(hub, tmp_path / "model").end()
        assert (code, "tokenizer.json: no such file" in said) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a small disk is mounted by root only")
def test_a_volume_that_is_too_small_is_reported_before_a_byte_is_fetched(hub: SmallHub, tmp_path: Path) -> None:
    command = f"mount -t tmpfs -o size=1M none {tmp_path} && exec {sys.executable} -m orca.cli.main fetch"
    settings = ["--uri", "hf://owner/name", "--into", f"{tmp_path}/model"]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": f"{tmp_path}/home"}
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{command} "$@"', "sh", *settings],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("NoSpace: hf://owner/name: 0.00 GB are still to be fetched")
    assert hub.sent == {}
