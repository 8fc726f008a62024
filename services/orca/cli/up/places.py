"""Where a system lives on its machine: its data folder, held by one supervisor at a time, and its ports."""

import errno
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from orca.core.domain.errors import SettingError
from orca.core.process.ports import free_port


def default_data_folder(port: int) -> Path:
    """One folder per public port under the user's state folder, so that systems side by side keep apart."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "orca" / str(port)


class DataFolder:
    """`redis/` with the request pool, kept from one start to the next; `logs/` with a file per process."""

    def __init__(self, folder: Path, *, remedy: str) -> None:
        """Args: remedy: the flag that leads to another folder."""
        self._remedy = remedy
        self.folder = folder.expanduser().resolve()
        self.redis = self.folder / "redis"
        self._logs = self.folder / "logs"

    def __enter__(self) -> "DataFolder":
        """Raises: SettingError when the folder cannot be made or another supervisor holds it."""
        make_folder(self._logs, "--data")
        self._lock = (self.folder / "lock").open("a+")
        try:
            # The kernel lets go of it when this process ends, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip()
            self._lock.close()
            who = f"another `orca up` ({holder})" if holder else "another `orca up`"
            raise SettingError(f"{self.folder} is in use by {who}; choose another {self._remedy}") from error
        self.sign("")
        return self

    def sign(self, address: str) -> None:
        """Write for others who holds the folder, and where it serves when that is known."""
        self._lock.truncate(0)
        self._lock.write(f"pid {os.getpid()}{f', {address}' if address else ''}\n")
        self._lock.flush()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.close()

    def fresh_logs(self) -> Path:
        """The folder of log files, those of the start before set aside as *.log.before."""
        for log in self._logs.glob("*.log"):
            log.replace(log.with_name(log.name + ".before"))
        return self._logs


def make_folder(folder: Path, flag: str) -> None:
    """Make a folder and its parents unless it is there. Raises: SettingError that names the flag."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"{flag}: {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise SettingError(f"{flag}: {folder} cannot be written to")


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA devices that processes started here would see, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(word for word in chosen.split(",") if word)
    return tuple(sorted((device.name.removeprefix("nvidia") for device in Path("/dev").glob("nvidia[0-9]*")), key=int))


def claim_port(host: str, port: int) -> int:
    """A port that a server could listen on now; 0 finds a free one.

    Raises: SettingError when it is taken, not allowed, or the host is no address of this machine.
    """
    try:
        wanted = port or free_port()
        family, kind, protocol, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a connection of an earlier server in TIME_WAIT does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise SettingError(f"--host {host} is not an address") from error
    except OSError as error:
        flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise SettingError(f"--host {host} --port {port}: {error.strerror}; choose another with {flag}") from error


def free_ports(count: int) -> list[int]:
    """Different free ports of this machine."""
    return [free_port() for _ in range(count)]
