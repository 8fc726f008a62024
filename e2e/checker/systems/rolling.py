"""A system with parts of two releases, which can hand over a part from one release to the other.

Each part is a process of the checker. If a part dies, the checker starts it again as the same release, like `orca up`
and Kubernetes. A hand-over ends a part in order and starts it again at the same address as the other release.
"""

import asyncio
import contextlib
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from checker.systems.checkouts import Release, Releases
from checker.systems.layout import GATEWAYS, GROUPS, PARTS, Layout
from checker.systems.pool_reader import OPEN_ACL
from checker.systems.processes import end_child, with_ranks
from checker.systems.system import System, SystemFailure, model_of, wait_for

DRAINS_WITHIN_S = 60.0
DEATHS_MAX, DEATHS_WITHIN_S = 6, 60.0
"""A part that dies this often, by itself or by faults, ends the run, as with `orca up`."""
WATCH_S = 0.05
SCHEMA_OF_GRAMMARS = 3
"""The first schema number that stores grammars; each release that knows it knows grammars, too."""


@dataclass(slots=True)
class Part:
    """A process and its successors."""

    name: str
    release: Release
    process: subprocess.Popen[bytes]
    is_kept: bool = True  # start it again when it dies; False during a hand-over
    deaths: deque[float] = field(default_factory=deque)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


class RollingSystem(System):
    """Two gateways and two groups on one Redis; all parts start as the release before.

    It has more than 15 methods because it replaces nearly all of `System` and also supervises the parts.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        *,
        releases: Releases,
        order: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """Args:
        flags: `--model DIR --dtype float32`; other options of `orca up` have no effect here.
        order: options of the new release's schedulers.
        """
        super().__init__(folder, flags, environment=environment)
        self.releases = releases
        self.order = order
        self.layout = Layout(Path(model_of(flags)), folder)
        # A new pool has the newest number of the first release that calls it.
        self.takes_grammars = releases.before.schemas[1] >= SCHEMA_OF_GRAMMARS
        self._parts: dict[str, Part] = {}
        self._watch: asyncio.Task[None] | None = None
        self._broken: str | None = None

    @property
    def url(self) -> str:
        return f"http://{self.addresses['gateway']}"

    @property
    def addresses(self) -> dict[str, str]:
        return self.layout.addresses

    @property
    def is_up(self) -> bool:
        return self._broken is None

    def check_up(self) -> None:
        if self._broken is not None:
            raise SystemFailure(self._broken)

    def parts(self) -> dict[str, psutil.Process]:
        found: dict[str, psutil.Process] = {}
        for part in self._parts.values():
            if not part.is_alive:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= with_ranks(part.name, psutil.Process(part.process.pid))
        self._family |= set(found.values())
        return found

    def release_of(self, name: str) -> Release:
        return self._parts[name].release

    def log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    async def hand_over(self, name: str, release: Release) -> int:
        """End a part in order and start it again as `release`. Returns: the exit code of the old process.

        Raises: SystemFailure if it does not end.
        """
        part = self._parts[name]
        part.is_kept = False
        if part.is_alive:
            part.process.terminate()
        try:
            await wait_for(lambda: not part.is_alive, DRAINS_WITHIN_S, f"the end of {name}")
        except TimeoutError as error:
            self._broken = f"{error}: {self._end_of_output(name)}"
            self.check_up()
        code = part.process.wait()
        part.release = release
        part.process = self._start(name, release, has_predecessor=True)
        part.is_kept = True
        return code

    async def pool(self, release: Release, *words: str) -> str:
        """Return the output of `orca pool ...` of a release, also of one that fails."""
        process = await asyncio.create_subprocess_exec(
            *self.layout.command("gateway")[:3],
            "pool",
            *words,
            *self.layout.pool_words(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=release.environment(self._environment),
        )
        output, _ = await process.communicate()
        return output.decode().strip()

    def command(self, name: str, release: Release, *, has_predecessor: bool = False) -> list[str]:
        """Return the command of a part as a release."""
        command = self.layout.command(name)
        if has_predecessor and name.startswith("scheduler"):
            command.append("--predecessor-exited")
        if release == self.releases.after and name.startswith("scheduler"):
            command += self.order
        return command

    def _start(self, name: str, release: Release, *, has_predecessor: bool = False) -> subprocess.Popen[bytes]:
        command = self.command(name, release, has_predecessor=has_predecessor)
        # Parts must not outlive a killed checker.
        leash = [setpriv, "--pdeathsig", "KILL"] if (setpriv := shutil.which("setpriv")) else []
        with self.log_of(name).open("ab") as log:
            return subprocess.Popen(
                [*leash, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=release.environment(self._environment),
                # A checkout as the working directory would come before PYTHONPATH.
                cwd=self.folder,
            )

    async def _keep(self) -> None:
        """Start dead parts again, until the system ends or a part has died too often."""
        while self._broken is None:
            for part in self._parts.values():
                if part.is_kept and not part.is_alive:
                    self._revive(part)
            await asyncio.sleep(WATCH_S)

    def _revive(self, part: Part) -> None:
        now, code = time.monotonic(), part.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        with self.output_path.open("a") as output:
            output.write(f"{datetime.now(UTC).isoformat().replace('+00:00', 'Z')} {part.name} {how}; started again\n")
        part.deaths.append(now)
        while part.deaths[0] < now - DEATHS_WITHIN_S:
            part.deaths.popleft()
        if len(part.deaths) >= DEATHS_MAX:
            self._broken = f"{part.name} died {DEATHS_MAX} times in a minute: {self._end_of_output(part.name)}"
            return
        part.process = self._start(part.name, part.release, has_predecessor=True)

    def _end_of_output(self, name: str) -> str:
        return self.log_of(name).read_text(errors="replace")[-2000:]

    async def _begin(self) -> None:
        for folder in (self.logs, self.layout.iterations, self.folder / "redis"):
            folder.mkdir(parents=True)
        (self.folder / "redis" / "users.acl").write_text(OPEN_ACL)
        self.output_path.touch()
        for name in ("redis", *PARTS):
            self._parts[name] = Part(name, self.releases.before, self._start(name, self.releases.before))
        self._watch = asyncio.create_task(self._keep())

    def _is_ready(self) -> bool:
        self.check_up()
        if not all('"epoch formed"' in self.log_of(f"scheduler-{group}").read_text() for group in GROUPS):
            return False
        try:
            urls = [f"http://{self.addresses[name]}/ready" for name in GATEWAYS]
            return all(httpx.get(url, timeout=1.0).status_code == 200 for url in urls)
        except httpx.HTTPError:
            return False

    async def _end(self) -> None:
        """End the gateways first and Redis last; kill what does not end in time."""
        if self._watch is not None:
            self._watch.cancel()
        self.parts()
        for names in (PARTS, ("redis",)):
            parts = [self._parts[name] for name in names if name in self._parts]
            for part in filter(lambda part: part.is_alive, parts):
                # A frozen process cannot end.
                part.process.send_signal(signal.SIGCONT)
                part.process.terminate()
            for part in parts:
                await asyncio.to_thread(end_child, part.process)
        self._kill_family()
