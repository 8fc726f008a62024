"""A hub on loopback with the routes of the real one, which counts what it sends and fails as it is told."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


class SmallHub:
    """One repository, `owner/name`, with a branch main; files of a megabyte or more are large ones (LFS)."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.sent: dict[str, int] = {}  # bytes by file
        self.said = dict(files)  # whose digests are listed
        self.needs_token = False
        self.cut_after: dict[str, int] = {}  # bytes after which the next answer of a file ends
        self.hangs = False  # a cut answer stays open
        self.knows_ranges = True
        self.is_down = False
        self.url = ""
        self.released = threading.Event()

    def listing(self) -> object:
        siblings = []
        for name, content in self.said.items():
            entry = {"rfilename": name, "size": len(content), "blobId": _git_blob(content)}
            if len(content) >= 1 << 20:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        return {"id": "owner/name", "sha": COMMIT, "siblings": siblings}


@contextmanager
def running(hub: SmallHub) -> Iterator[SmallHub]:
    """Serve a small hub on loopback, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    yield hub
    hub.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: SmallHub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        at_file = f"/owner/name/resolve/{COMMIT}/"
        if self.hub.is_down:
            self._answer(503, b"")
        elif self.hub.needs_token and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, b"", {"X-Error-Code": "GatedRepo"})
        elif path in ("/api/models/owner/name/revision/main", f"/api/models/owner/name/revision/{COMMIT}"):
            self._answer(200, json.dumps(self.hub.listing()).encode())
        elif path.startswith(at_file) and (name := path.removeprefix(at_file)) in self.hub.files:
            self._send_file(name)
        else:
            code = "RevisionNotFound" if "/owner/name/" in path else "RepoNotFound"
            self._answer(404, b"", {"X-Error-Code": code})

    def log_message(self, *_: object) -> None:
        pass

    def _send_file(self, name: str) -> None:
        content = self.hub.files[name]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and self.hub.knows_ranges else 0
        headers = {"ETag": f'"{_git_blob(content)}"', "X-Repo-Commit": COMMIT}
        status = 206 if asked and self.hub.knows_ranges else 200
        self._answer(status, b"", headers, length=len(content) - start)
        part = content[start : start + self.hub.cut_after.pop(name, len(content))]
        self.wfile.write(part)
        self.wfile.flush()
        self.hub.sent[name] = self.hub.sent.get(name, 0) + len(part)
        if start + len(part) < len(content) and self.hub.hangs:
            self.hub.released.wait(60)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, length: int = -1) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(max(length, len(body)))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
