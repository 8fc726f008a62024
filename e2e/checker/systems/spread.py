"""A system over network namespaces, so that the link between any two of its parts can be cut, both ways or one way.

    hub 10.77.0.1 (the checker) ── bridge ┬ redis .2
                                          ├ gateway .3
                                          ├ scheduler .4
                                          ├ stage0 .10  controller and ranks
                                          └ stage1 .11

The checker runs inside its own network and mount namespace (`enter_own_network`), which the kernel removes at its end,
so that nothing outside changes. A cut drops packets at their sender, by address and, for a part of a link, by port.
Both ends keep their connections and receive nothing, as in a real partition. A part that dies is not started again.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from checker.systems.pool_reader import OPEN_ACL
from checker.systems.processes import end_child, with_ranks
from checker.systems.system import System, SystemFailure, model_of

INSIDE_VARIABLE = "ORCA_CHECKER_OWN_NETWORK"
NETWORK = "10.77.0"
HOSTS = {"redis": 2, "gateway": 3, "scheduler": 4, "stage0": 10, "stage1": 11}
CONTROL_PORT, REDIS_PORT, HTTP_PORT, RENDEZVOUS_PORT, METRICS_PORT = 7000, 6379, 8000, 7001, 7002
NAMES = {"scheduler": "scheduler-0", "stage0": "worker-0.0", "stage1": "worker-0.1"}


def address(host: str, port: int) -> str:
    return f"{NETWORK}.{HOSTS[host]}:{port}"


def missing_prerequisite() -> str | None:
    """Return the reason why this machine cannot cut links; None if it can."""
    if os.geteuid() != 0:
        return "namespaces and packet filters need root"
    missing = [name for name in ("unshare", "ip", "iptables", "redis-server") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def enter_own_network(words: Sequence[str]) -> None:
    """Run this command line again in its own namespaces. Returns: only if this process already runs there."""
    if INSIDE_VARIABLE in os.environ:
        _run("mount", "-t", "tmpfs", "none", "/run/netns")
        return
    Path("/run/netns").mkdir(exist_ok=True)
    environment = os.environ | {INSIDE_VARIABLE: "1"}
    command = ["unshare", "--net", "--mount", sys.executable, "-m", "checker", *words]
    os.execvpe(command[0], command, environment)


@dataclass(frozen=True, slots=True)
class LinkCut:
    """A cut of a link: packets from one part to another are lost."""

    sender: str
    receiver: str
    part: str = "all"  # all | control (only gRPC) | data (everything except gRPC)

    def rules(self) -> list[list[str]]:
        """Return the arguments of iptables in the sender's namespace, after -A or -D OUTPUT."""
        to = ["-d", f"{NETWORK}.{HOSTS[self.receiver]}"]
        port = str(CONTROL_PORT)
        match self.part:
            case "control":
                return [[*to, "-p", "tcp", end, port, "-j", "DROP"] for end in ("--dport", "--sport")]
            case "data":
                return [[*to, "-p", "tcp", "!", "--dport", port, "!", "--sport", port, "-j", "DROP"]]
        return [[*to, "-j", "DROP"]]

    def apply(self) -> None:
        self._change("-A")

    def heal(self) -> None:
        self._change("-D")

    def _change(self, how: str) -> None:
        for rule in self.rules():
            _run("ip", "netns", "exec", self.sender, "iptables", how, "OUTPUT", *rule)


class SpreadSystem(System):
    """A group of two stages, a gateway and a Redis, each in its own namespace."""

    ready_within_s = 180.0

    def __init__(self, folder: Path, flags: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
        """Args: flags: `--model DIR --dtype NAME`; other options of `orca up` have no effect here."""
        super().__init__(folder, flags, environment=environment)
        self._model = model_of(flags)
        self._parts: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def output(self) -> str:
        return ""  # these parts have no supervisor

    @property
    def url(self) -> str:
        return f"http://{address('gateway', HTTP_PORT)}"

    @property
    def addresses(self) -> dict[str, str]:
        return {
            "redis": f"redis://{address('redis', REDIS_PORT)}",
            "gateway": address("gateway", HTTP_PORT),
            "scheduler-0": f"http://{address('scheduler', METRICS_PORT)}/metrics",
        }

    def check_up(self) -> None:
        for host, process in self._parts.items():
            if process.poll() is not None:
                log = (self.logs / f"{NAMES.get(host, host)}.log").read_text()[-2000:]
                raise SystemFailure(f"{host} ended with status {process.returncode}: {log}")

    def parts(self) -> dict[str, psutil.Process]:
        found: dict[str, psutil.Process] = {}
        for host, popen in self._parts.items():
            if popen.poll() is not None:
                continue
            found |= with_ranks(NAMES.get(host, host), psutil.Process(popen.pid))
        self._family |= set(found.values())
        return found

    async def _begin(self) -> None:
        self.logs.mkdir(parents=True)
        self.iterations.mkdir()
        _build_network()
        for host, command in self._commands().items():
            self._start(host, command)

    def _is_ready(self) -> bool:
        self.check_up()
        try:
            return httpx.get(f"{self.url}/ready", timeout=1.0).status_code == 200
        except httpx.HTTPError:
            return False

    def _commands(self) -> dict[str, list[str]]:
        """Return the commands that `orca up` would start, with other addresses."""
        orca = [sys.executable, "-m", "orca.cli.main"]
        model = ["--model", self._model, "--dtype", "float32"]
        pool = ["--pool", self.addresses["redis"], "--deployment", "local"]
        stages = ",".join(address(stage, CONTROL_PORT) for stage in ("stage0", "stage1"))
        host = f"{NETWORK}.{HOSTS['gateway']}"
        door = ["--open-to-network", "true"]
        name = ["--name", Path(self._model).name, "--host", host, "--port", str(HTTP_PORT)]
        listen = ["--listen", address("scheduler", RENDEZVOUS_PORT)]
        metrics = ["--metrics-listen", address("scheduler", METRICS_PORT)]
        log = ["--iteration-log", str(self.iterations / "scheduler-0.jsonl")]
        group = ["--group", "group-0", "--stages", stages, "--generation", "1", "--prefetch", "1"]
        return {
            "redis": self._redis_command(),
            "gateway": [*orca, "gateway", *model, *name, *door, *pool],
            "scheduler": [*orca, "scheduler", *model, *group, *listen, *metrics, *log, *pool],
            "stage0": [*orca, "worker", *model, *self._stage_words(0)],
            "stage1": [*orca, "worker", *model, *self._stage_words(1)],
        }

    def _stage_words(self, stage: int) -> list[str]:
        host = f"stage{stage}"
        words = ["--stage", str(stage), "--stages", "2", "--listen", address(host, CONTROL_PORT)]
        data = ["--data-host", f"{NETWORK}.{HOSTS[host]}", "--slots-max", "16384", "--threads", "1"]
        return [*words, *data, "--iteration-log", str(self.iterations / f"worker-0.{stage}.jsonl")]

    def _redis_command(self) -> list[str]:
        folder = self.folder / "data" / "redis"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "users.acl").write_text(OPEN_ACL)
        words = ["--dir", str(folder), "--bind", f"{NETWORK}.{HOSTS['redis']}", "--port", str(REDIS_PORT)]
        # Only the namespaces of this run can reach it.
        words += ["--protected-mode", "no"]
        lasting = ["--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction"]
        return ["redis-server", *words, *lasting, "--aclfile", str(folder / "users.acl")]

    def _start(self, host: str, command: list[str]) -> None:
        with (self.logs / f"{NAMES.get(host, host)}.log").open("wb") as log:
            self._parts[host] = subprocess.Popen(
                ["ip", "netns", "exec", host, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )

    async def _end(self) -> None:
        """End the gateway first and Redis last; kill what does not end in time."""
        self.parts()
        for host in ("gateway", "scheduler", "stage0", "stage1", "redis"):
            if (process := self._parts.get(host)) is not None:
                process.send_signal(signal.SIGTERM)
                end_child(process)
        self._kill_family()


def _build_network() -> None:
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "hub", "type", "bridge")
    _run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", "hub")
    _run("ip", "link", "set", "hub", "up")
    for host, number in HOSTS.items():
        _run("ip", "netns", "add", host)
        _run("ip", "link", "add", f"to-{host}", "type", "veth", "peer", "name", "eth0", "netns", host)
        _run("ip", "link", "set", f"to-{host}", "master", "hub", "up")
        _run("ip", "-n", host, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", host, "link", "set", device, "up")


def _run(*words: str) -> None:
    """Run a command. Raises: SystemFailure with the errors of the command."""
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemFailure(f"{' '.join(words)}: {ran.stderr.strip()}")
