"""One process of the system as plain data: what to run, and where to check that it is up."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class Role(enum.IntEnum):
    """The role of a process. Processes stop in this order: each role after all processes of the role before it."""

    GATEWAY = 0  # first, so that no new calls arrive while open streams end
    SCHEDULER = 1  # gives its requests back to the pool
    WORKER = 2
    REDIS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process that keeps its name and addresses over restarts."""

    role: Role
    name: str  # unique; also the name of its log file
    command: tuple[str, ...]
    address: str  # host:port of a gateway or worker, a URL of any other process
    log: Path
    health: str | None = None  # host:port whose GET /health the process's own event loop answers; None: no probe
    # Added to the supervisor's own environment; may hold keys.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    scheduler: str | None = None  # for a worker: the name of its group's scheduler
    # Added to the command of a restart: by then the previous process is known to be dead.
    restart_arguments: tuple[str, ...] = ()
    stop_seconds: float = 5.0  # from SIGTERM to SIGKILL
