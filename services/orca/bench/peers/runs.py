"""Runs of one system: a peer as a process of its own, Orca's engine, and servers over HTTP."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import orca
from orca.bench.client import LoadTarget, run_trace
from orca.bench.peers.comparison import PeerComparison, PeerFailed
from orca.bench.peers.memory import MemoryWatch, ProcessPeak, memory_of_ranks, slots_in_use
from orca.bench.peers.results import PeerRound
from orca.bench.peers.workload import PeerAnswer
from orca.bench.system import log_tail, running_system
from orca.bench.turns.trace import FixedTrace
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.process.parent_death import die_with_parent
from orca.planner.simulate.outcomes import summarise
from orca.planner.workload.trace import Trace
from orca.worker.machine import thread_variables


def run_engine(dtype: str, comparison: PeerComparison) -> PeerRound:
    """Run the engine alone. Args: dtype: the first argument of engine_peer.py."""
    words = "engine_peer", dtype, *files_of(comparison, "engine.json")
    return run_peer(comparison, sys.executable, *words, variables=thread_variables(comparison.threads))


def files_of(comparison: PeerComparison, *names: str) -> list[str]:
    """Return the file of the workload, then files of these names in the comparison's folder."""
    return [str(comparison.folder / name) for name in ("workload.json", *names)]


def run_peer(
    comparison: PeerComparison, python: str, module: str, *words: str, variables: Mapping[str, str] | None = None
) -> PeerRound:
    """Run a module of this package whose last argument names the file of its answer."""
    memory = run_module(comparison, python, module, *words, variables=variables)
    return PeerRound(answer=PeerAnswer.load(Path(words[-1])), memory=memory)


def run_module(
    comparison: PeerComparison, python: str, module: str, *words: str, variables: Mapping[str, str] | None = None
) -> list[ProcessPeak]:
    """Run a module of this package as its own process.

    Args: variables: further environment variables.
    Returns: the peak memory of its processes.
    Raises: PeerFailed with the end of its output.
    """
    process = subprocess.Popen(
        die_with_parent(peer_command(python, module, *words)),
        env={**os.environ, **peer_environment(comparison), **(variables or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = MemoryWatch()
    watch.follow(process.pid)
    with process:
        _, errors = process.communicate()
    watch.stop()
    if process.returncode:
        raise PeerFailed(f"{module} {words[0]} ended with {process.returncode}:\n{errors[-2000:]}")
    return watch.peaks


def peer_command(python: str, module: str, *words: str) -> list[str]:
    """Return the command that runs a module of this package with the Python of any environment."""
    return [python, "-m", f"orca.bench.peers.{module}", *words]


def peer_environment(comparison: PeerComparison) -> Mapping[str, str]:
    """Return the environment of a peer's process, in which another Python finds this package."""
    roots = os.pathsep.join(dict.fromkeys(str(Path(folder).parent) for folder in orca.__path__))
    return {**comparison.environment, "PYTHONPATH": roots}


def run_orca(name: str, more: Sequence[str], comparison: PeerComparison) -> PeerRound:
    """Run `orca up`. Args: more: options for it, which override those of the comparison."""
    watch = MemoryWatch()
    system = running_system(
        str(comparison.model),
        [*comparison.up_options, *more],
        comparison.folder,
        vocab_size=comparison.vocab_size,
        environment=comparison.environment,
        on_start=watch.follow,
    )
    return asyncio.run(serve_trace(comparison, name, system, watch, comparison.folder / "up.log"))


async def serve_trace(
    comparison: PeerComparison,
    name: str,
    system: AbstractAsyncContextManager[LoadTarget],
    watch: MemoryWatch,
    log: Path,
) -> PeerRound:
    """Run the trace over HTTP, after a warm-up. Args: log: file with the system's output."""
    async with system as target:
        warm_up = await run_trace(target, _warm_up(comparison))
        outcomes = await run_trace(target, comparison.trace)
        watch.stop()
        logs = {
            str(file): file.read_bytes().splitlines() for file in comparison.folder.glob("data-*/logs/worker-*.log")
        }
    report = summarise(outcomes)
    if errors := summarise(warm_up).errors or report.errors:
        raise PeerFailed(f"{name}: {errors}; the end of its output:\n{log_tail(log)}")
    answer = PeerAnswer(
        seconds=report.duration_s,
        tokens=[list(outcome.token_ids) for outcome in outcomes],
        first_s=[outcome.token_s[0] - outcome.arrival_s for outcome in outcomes],
        last_s=[outcome.latency_s for outcome in outcomes],
    )
    # The requests of the warm-up arrive all at once. At a low rate they take more slots than the trace.
    slots = max(slots_in_use(seen, DEFAULT_BLOCK_TOKENS) for seen in (warm_up, outcomes))
    return PeerRound(
        answer=answer, memory=watch.peaks_of_running, rank_memory=memory_of_ranks(logs, slots) if logs else None
    )


def _warm_up(comparison: PeerComparison) -> Trace:
    """Return the first requests, all at once, as `PeerWorkload.head` has them for the peers."""
    first, trace = comparison.trace.requests[: 2 * comparison.batch_size], comparison.trace
    requests = tuple(replace(request, arrival_s=0.0, new_tokens=min(4, request.new_tokens)) for request in first)
    prompts = tuple(tuple(trace.prompt(request.index, comparison.vocab_size)[::-1]) for request in first)
    return FixedTrace(trace.spec, requests, prompts)
