"""Operators that run one after another. Each is a process that starts and can be killed in a moment.

A server process has imported the operator already and forks each run, which saves two seconds of imports.
"""

import multiprocessing
from multiprocessing import forkserver
from pathlib import Path

import pytest

from support.operator.api_server import ApiServer
from support.operator.operator_main import LOG, run_operator
from support.operator.recording_proxy import RecordingProxy
from support.operator.shop import IMAGES

_KUBECONFIG = "kubeconfig"
"""Relative: each run has its own in its working directory. The client library reads the variable once, when it
is imported."""


def prepare() -> None:
    """Start the server process; once, before the first run."""
    multiprocessing.set_forkserver_preload(["orca.operator.service"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", _KUBECONFIG)
        forkserver.ensure_running()


class OperatorRuns:
    """The operators of one namespace, which reach the API server through a proxy."""

    def __init__(self, server: ApiServer, proxy: RecordingProxy, folder: Path, namespace: str) -> None:
        self._proxy, self._folder, self._namespace = proxy, folder, namespace
        folder.mkdir()
        server.write_kubeconfig(folder / _KUBECONFIG, proxy.url)
        self._process: multiprocessing.process.BaseProcess | None = None

    @property
    def log(self) -> str:
        return (self._folder / LOG).read_text()

    @property
    def is_alive(self) -> bool:
        """Return True until `kill` has done all of its work."""
        return self._process is not None

    def start(self) -> None:
        options = ["--namespaces", self._namespace, "--listen", "127.0.0.1:0", "--resync-seconds", "1"]
        words = [*IMAGES, *options, "--log-format", "text"]
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=run_operator, args=(str(self._folder), words), daemon=True)
        self._process.start()

    def kill(self) -> None:
        """Send SIGKILL, and return when the process is dead."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._proxy.hang_up()
            self._process = None
