"""Machine resources of a system: the data folder, which one supervisor locks at a time, free ports and GPUs."""

import errno
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from orca.core.domain.errors import SettingError
from orca.core.process.ports import free_port


def default_data_folder(port: int) -> Path:
    """Return a folder per public port below the user's state folder, so that several systems do not share data."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "orca" / str(port)


class DataFolder:
    """A folder with `redis/`, the request pool that outlives restarts, and `logs/`, a file per process."""

    def __init__(self, folder: Path, *, remedy: str) -> None:
        """Args: remedy: the flag with which the user can choose another folder."""
        self._remedy = remedy
        self.folder = folder.expanduser().resolve()
        self.redis = self.folder / "redis"
        self._logs = self.folder / "logs"

    def __enter__(self) -> "DataFolder":
        """Lock the folder. Raises: SettingError when it cannot be made or another supervisor has locked it."""
        make_folder(self._logs, "--data")
        self._lock = (self.folder / "lock").open("a+")
        try:
            # The kernel releases the lock when this process ends, however it ends.
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
        """Write the owner's pid, and its address once that is known, into the lock file for other processes."""
        self._lock.truncate(0)
        self._lock.write(f"pid {os.getpid()}{f', {address}' if address else ''}\n")
        self._lock.flush()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.close()

    def fresh_logs(self) -> Path:
        """Return the folder of log files after renaming those of the previous start to *.log.before."""
        for log in self._logs.glob("*.log"):
            log.replace(log.with_name(log.name + ".before"))
        return self._logs


def make_folder(folder: Path, flag: str) -> None:
    """Make a folder and its parents unless they exist. Raises: SettingError that names the flag."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"{flag}: {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise SettingError(f"{flag}: {folder} cannot be written to")


def visible_gpus() -> tuple[str, ...]:
    """Return the NVIDIA devices that child processes would see, named as in CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(word for word in chosen.split(",") if word)
    return tuple(sorted((device.name.removeprefix("nvidia") for device in Path("/dev").glob("nvidia[0-9]*")), key=int))


def pick_port(host: str, port: int) -> int:
    """Return a port that a server can listen on now: `port` itself, or a free one for 0.

    Raises: SettingError when the port is taken or not allowed, or when the host is not an address of this machine.
    """
    try:
        wanted = port or free_port()
        family, kind, protocol, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Servers set this too: a connection of an earlier server in TIME_WAIT does not count.
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
    """Return `count` different free ports of this machine."""
    return [free_port() for _ in range(count)]
