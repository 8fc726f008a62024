"""Certificates that tests make for themselves, with the openssl command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


@dataclass(frozen=True)
class Certificate:
    """PEM files: of a certificate, of its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; `ca` is its own."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl command is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._key = folder / "ca.key"
        _openssl("req", "-x509", *_KEY, "-keyout", self._key, "-out", self.ca, "-subj", f"/CN={folder.name}")

    def issue(self, name: str, subject_alt_name: str = "IP:127.0.0.1,DNS:localhost") -> Certificate:
        """A new one each time; files of the same name are replaced. Args: subject_alt_name: who may show it."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        signing, extensions = self._folder / "request.csr", self._folder / "extensions"
        extensions.write_text(f"subjectAltName={subject_alt_name}\n")
        _openssl("req", *_KEY, "-keyout", made.key, "-out", signing, "-subj", f"/CN={name}")
        signer = ["-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions]
        _openssl("x509", "-req", "-in", signing, *signer, "-out", made.certificate)
        return made


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
