"""The settings of a run, and what a disturbance gets while the load runs."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis.asyncio

from checker.clients.client import CallProgress, Client
from checker.clients.workload import DEADLINES, PlannedCall, PromptSource
from checker.history.records import HistoryWriter
from checker.systems.system import System


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run."""

    seed: int
    model: Path
    is_chain: bool
    prompt_source: PromptSource
    roles: tuple[str, ...]  # to disturb, if clients of this server can survive it
    disturb: "Disturbance"
    rate: float  # calls per second
    open_max: int  # most concurrent calls; further calls wait, so that they do not pile up on a slow machine
    distinct_calls: int  # number of different calls, which repeat until the faults are done
    max_tokens: tuple[int, int]  # least and most max_tokens of a call
    up: tuple[str, ...]  # further options for `orca up`
    folder: Path  # for all files of the run
    make_system: "SystemFactory" = System
    environment: Mapping[str, str] = field(default_factory=dict)
    deadlines: float = DEADLINES  # share of the calls that have one
    # A number: judge each call at its end, and the growth of processes that lived at least this long.
    least_life_s: float | None = None
    injects: bool = False  # install points and recorder in the processes
    mutant: str | None = None  # a name in points.mutants


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The objects that a disturbance can use while the load runs."""

    settings: RunSettings
    system: System
    history: HistoryWriter
    client: Client
    http: httpx.AsyncClient
    pool: redis.asyncio.Redis
    plans: Sequence[PlannedCall]
    # Makes a call and adds all its records to the history.
    run_call: Callable[[PlannedCall], Awaitable[CallProgress]]
    roles: tuple[str, ...]  # roles whose loss clients can survive
    inject: Path  # folder that checker and injected code share
    report: Callable[[str], None]  # prints a line


Disturbance = Callable[[RunContext], Awaitable[None]]
SystemFactory = Callable[..., System]
