"""One process of the system, as plain data: what to run, and how to tell that it is up."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class Role(enum.IntEnum):
    """What a process is. They are stopped in this order, each role after the one before it has ended."""

    GATEWAY = 0  # first, so that nothing new arrives while its open streams end
    SCHEDULER = 1  # gives its requests back to the pool
    WORKER = 2
    REDIS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process that is restarted under the same name, with the same addresses."""

    role: Role
    name: str  # unique; also the name of its log file
    command: tuple[str, ...]
    address: str  # where it is reached: host:port of gateways and workers, a URL of the others
    log: Path
    health: str | None = None  # host:port whose GET /health comes out of the process's own event loop; None: not probed
    # Added to the supervisor's own; may hold keys.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    scheduler: str | None = None  # of a worker: the name of its group's scheduler
    # Added to the command of a restart: by then the process before it is known to be dead.
    restart_arguments: tuple[str, ...] = ()
    stop_seconds: float = 5.0  # from SIGTERM to SIGKILL
