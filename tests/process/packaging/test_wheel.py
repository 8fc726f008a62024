"""The wheel: what `pip install orca-serving` puts on a machine."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    [path] = folder.glob("orca_serving-*.whl")
    return zipfile.ZipFile(path)


def test_every_tracked_file_of_the_packages_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    roots = ["services/orca", "operator/orca", "kernels/orca"]
    listed = subprocess.run(["git", "ls-files", *roots], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = {name.partition("/")[2] for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert len(tracked) > 50
    assert tracked - set(wheel.namelist()) == set()


def test_a_wheel_holds_nothing_outside_the_namespace(wheel: zipfile.ZipFile) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in wheel.namelist()} == {"orca", "orca_serving"}
    assert "orca/__init__.py" not in wheel.namelist()


def test_the_small_model_is_found_in_an_installed_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from orca.cli.small_model import *; print(small_model_folder())"
    )
    # -S leaves out site-packages, and with it the checkout that tests usually import.
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, tmp_path], check=True, capture_output=True, text=True
    )
    folder = Path(found.stdout.strip())
    assert folder.is_relative_to(tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_the_command_is_called_orca(wheel: zipfile.ZipFile) -> None:
    [entry_points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "orca = orca.cli.main:main" in wheel.read(entry_points).decode()
