"""A model's name leads to a folder. The hub is a small one on loopback; the library that reads it is the real one."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from orca.cli.model_folder import find_model
from orca.cli.small_model import RESTORES, SMALL_MODELS, small_model_folder
from orca.core.domain.errors import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SERVED = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "chat_template.jinja": b"x"}
LEFT = {
    "consolidated.safetensors": b"the weights once more",
    "onnx/config.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"code",
}
FIND = """
import json, sys
from orca.cli.model_folder import find_model
print(json.dumps(list(map(str, find_model(sys.argv[1])))))
"""


class Hub(BaseHTTPRequestHandler):
    """One repository, `owner/name`."""

    def do_GET(self) -> None:
        files = SERVED | LEFT
        at_file = f"/owner/name/resolve/{COMMIT}/"
        if self.path.startswith("/api/models/owner/name/tree/"):
            self._answer([{"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40} for path in files])
        elif self.path.startswith("/api/models/owner/name"):
            self._answer({"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]})
        elif self.path.startswith(at_file) and (name := self.path.removeprefix(at_file)) in files:
            self._send(200, files[name], {"ETag": f'"{name:0>40}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(404, b"", {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def find(name: str, cache: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    """Run the call in a process of its own: the library reads its variables when it is imported."""
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", FIND, name]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_model_of_the_hub_is_fetched_without_code_pickles_and_second_copies(hub: str, tmp_path: Path) -> None:
    found = find("owner/name", tmp_path, hub)
    folder, name = json.loads(found.stdout)
    assert name == "owner/name"
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == SERVED


def test_a_fetched_model_is_found_without_a_network(hub: str, tmp_path: Path) -> None:
    first = find("owner/name", tmp_path, hub)
    again = find("owner/name", tmp_path, "http://127.0.0.1:9")
    assert again.stdout == first.stdout != ""


def test_a_model_that_the_hub_does_not_have_is_refused_by_its_name(hub: str, tmp_path: Path) -> None:
    said = find("owner/other", tmp_path, hub).stderr
    assert "ModelError: --model owner/other is neither a folder nor a model that ships" in said
    assert "and the hub could not provide it" in said


def test_a_folder_has_its_own_name_as_model_name(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to("own")
    assert find_model(f"{tmp_path}/link") == (tmp_path / "link", "own")
    with pytest.raises(ModelError, match="is neither a folder nor a model that ships"):
        find_model("/no/such/folder")


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_model_that_ships_is_found_by_its_name_in_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model(name) == (small_model_folder(name), name)


def test_a_folder_comes_before_a_model_that_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / RESTORES).mkdir()
    assert find_model(RESTORES) == (Path(RESTORES), RESTORES)


def test_a_file_with_the_name_of_a_model_that_ships_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / RESTORES).touch()
    assert find_model(RESTORES) == (small_model_folder(RESTORES), RESTORES)


@pytest.mark.parametrize("name", ["orca-restor", "Orca-Restore"])
def test_an_unknown_name_is_refused_with_the_names_of_the_models_that_ship(name: str, hub: str, tmp_path: Path) -> None:
    said = find(name, tmp_path, hub).stderr
    assert f"--model {name} is neither a folder nor a model that ships with Orca (orca-austen, orca-restore)" in said
