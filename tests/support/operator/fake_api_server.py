"""An API server that is only a dictionary behind HTTP: it keeps what it is given, and refuses what a test names."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from kubernetes import client

from orca.operator.cluster.api_server import KINDS, Cluster
from orca.operator.domain import names

Json = dict[str, Any]
_MADE = {"generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
_PLURALS = {kind.plural for kind in KINDS.values()}


class FakeApiServer:
    """Objects by path. It checks nothing and runs no controllers."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.said: list[tuple[str, str, Json | None]] = []  # method, path and body of each call
        self.refuses: dict[tuple[str, str], tuple[int, str]] = {}  # method and end of a path: status and message

        self.admits: Callable[[Json], Json] = lambda body: body  # what an admission makes of a body

    def status(self, name: str) -> Json:
        """Return the status of an OrcaDeployment, as last written."""
        found = [body for _, path, body in self.said if path.endswith(f"/{name}/status") and body is not None]
        told: Json = found[-1]["status"]
        return told

    def calls(self, method: str, end: str) -> int:
        return sum(said[0] == method and said[1].endswith(end) for said in self.said)

    def answer(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        self.said.append((method, path, body))
        for (refused, end), (status, message) in self.refuses.items():
            if method == refused and path.endswith(end):
                return status, {"message": message}
        if method == "GET":
            return self._read(path)
        if method == "DELETE":
            return (200, {}) if self.objects.pop(path, None) else (404, {"message": "gone"})
        assert body is not None
        body = self.admits(body)
        if method == "POST":
            path += "/" + body["metadata"].get("name", f"generated-{len(self.said)}")
        if method == "POST" and path in self.objects:
            return 409, {"message": "it is there already"}
        if path.endswith("/status") and path.removesuffix("/status") in self.objects:
            return self._write_status(path.removesuffix("/status"), body)
        there = self.objects.get(path, {"metadata": {**_MADE, "uid": f"uid-{len(self.objects)}"}})
        metadata = there["metadata"] | body["metadata"]
        if annotations := (there["metadata"].get("annotations") or {}) | (body["metadata"].get("annotations") or {}):
            metadata["annotations"] = annotations
        self.objects[path] = {**there, **body, "metadata": metadata}
        return 200, self.objects[path]

    def _write_status(self, path: str, body: Json) -> tuple[int, Json]:
        """Write the status of a resource that exists. A write in a version is one of its owner, and of nothing else."""
        there = self.objects[path]
        metadata, before = there["metadata"], there.get("status", {})
        wanted, known = body["metadata"].get("resourceVersion"), metadata["resourceVersion"]
        if wanted not in (None, known):
            return 409, {"message": "the object has been modified"}
        owner = body["status"] if wanted else {key: before[key] for key in before if key == names.OPERATOR_FIELD}
        others = {key: each for key, each in (before if wanted else body["status"]).items() if key not in owner}
        others.pop(names.OPERATOR_FIELD, None)
        self.objects[path] = {
            **there,
            "metadata": {**metadata, "resourceVersion": str(int(known) + 1)},
            "status": others | owner,
        }
        return 200, self.objects[path]

    def _read(self, path: str) -> tuple[int, Json]:
        if path in self.objects:
            return 200, self.objects[path]
        if path.rpartition("/")[2] in _PLURALS:
            items = [each for of, each in self.objects.items() if of.rpartition("/")[0] == path]
            return 200, {"items": [item for item in items if "labels" in item["metadata"]]}
        return 404, {"message": "there is none"}


@contextmanager
def fake_api_server(write_s: Callable[[], float] = lambda: math.inf) -> Iterator[tuple[FakeApiServer, Cluster]]:
    """The server, and the operator's way to it. Args: write_s: as of the cluster."""
    fake = FakeApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer is one packet; its body does not wait 40 ms for the acknowledgement of its head

        def handle_any(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = fake.answer(self.command, urlsplit(self.path).path, json.loads(content or b"null"))
            written = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(written)))
            self.end_headers()
            self.wfile.write(written)

        do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815 - names of the library

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{server.server_port}"
        try:
            with client.ApiClient(configuration) as api:
                yield fake, Cluster(api, write_s=write_s)
        finally:
            server.shutdown()
