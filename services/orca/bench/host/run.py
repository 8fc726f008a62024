"""`orca bench host`: measures what schedulers commit and what gateways stream, per second of processor time.

    commits   requests wait in the pool, and one or more schedulers run them all on null engines
    events    many streams are open, tokens come at a given rate, and a gateway turns each token into an event
    refusals  clients stream, and requests that are refused come beside them

Each run has its own Redis, schedulers and gateways. Wall-clock time shows what this machine did while all processes
shared its processors. Processor time shows what a process could do with a processor for itself.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from orca.bench.host.commits import CommitFigures, CommitLoad, measure_commits
from orca.bench.host.events import StreamFigures, StreamLoad, measure_events
from orca.bench.host.parts import HostFailed
from orca.bench.host.refusals import RefusalFigures, RefusalLoad, lines_of, measure_refusals
from orca.core.domain.model import load_model_info
from orca.planner.workload.lengths import Range

PROMPT_TOKENS = 32
NEW_TOKENS = Range(128, 384)
"""Tokens of a request: ends spread over the steps. A stream of the gateway has the mean of this range."""

SMALL_MODEL_STEP_US = 20_000
"""A step of a small model on a processor: refusals are measured beside such steps if no other time is given."""

LIMIT_S = 1200.0
"""Time limit of one run: submitting a million requests takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """The runs to make; a part without sizes is left out."""

    batch_sizes: Sequence[int]
    step_us: int
    waiting: Sequence[int]
    tokens: int
    streams: Sequence[int]
    tokens_per_s: float
    schedulers: Sequence[int] = (1,)
    gateways: Sequence[int] = (1,)
    waiting_streams: Sequence[int] = (0,)
    refusals: Sequence[float] = ()  # seconds between two bad prompts


@dataclass(frozen=True, slots=True)
class HostFigures:
    """The measurements of all runs."""

    commits: Sequence[CommitFigures]
    events: Sequence[StreamFigures]
    refusals: Sequence[RefusalFigures] = ()


def measure(plan: HostPlan, model_folder: Path, folder: Path, progress: Callable[[str], None]) -> HostFigures:
    """Make all runs of a plan, one after the other.

    Args: model_folder: the model with the tokenizer and the sizes; its weights are not read.
    Raises: HostFailed.
    """
    model = load_model_info(model_folder)

    def run_folder(name: str) -> Path:
        progress(name)
        new_folder = folder / name
        new_folder.mkdir()
        return new_folder

    async def run() -> HostFigures:
        commits, events, refusals = [], [], []
        for size, waiting, schedulers in product(plan.batch_sizes, plan.waiting, plan.schedulers):
            commit_load = CommitLoad(
                schedulers=schedulers,
                batch_size=size,
                waiting=waiting,
                tokens=plan.tokens,
                new_tokens=NEW_TOKENS,
                prompt_tokens=PROMPT_TOKENS,
                step_us=plan.step_us,
            )
            async with asyncio.timeout(LIMIT_S):
                name = f"batch-{size}-waiting-{waiting}-schedulers-{schedulers}"
                commits.append(await measure_commits(model, commit_load, run_folder(name)))
        for size, waiting, gateways in product(plan.streams, plan.waiting_streams, plan.gateways):
            stream_load = StreamLoad(
                gateways=gateways,
                streams=size,
                waiting=waiting,
                tokens_per_s=plan.tokens_per_s,
                new_tokens=(NEW_TOKENS.low + NEW_TOKENS.high) // 2,
                prompt_tokens=PROMPT_TOKENS,
            )
            async with asyncio.timeout(LIMIT_S):
                name = f"streams-{size}-waiting-{waiting}-gateways-{gateways}"
                events.append(await measure_events(model, stream_load, run_folder(name)))
        for interval_s in plan.refusals:
            refusal_load = RefusalLoad(
                interval_s=interval_s,
                step_us=plan.step_us or SMALL_MODEL_STEP_US,
                new_tokens=NEW_TOKENS.low,
                prompt_tokens=PROMPT_TOKENS,
            )
            async with asyncio.timeout(LIMIT_S):
                refusals.append(await measure_refusals(model, refusal_load, run_folder(f"refusals-{interval_s:g}")))
        return HostFigures(commits, events, refusals)

    try:
        return asyncio.run(run())
    except TimeoutError as error:
        raise HostFailed(f"a run did not end within {LIMIT_S:g} s") from error


def lines(figures: HostFigures) -> list[str]:
    """Return the figures as tables for a terminal."""
    return [*_lines_of_commits(figures.commits), *_lines_of_events(figures.events), *lines_of(figures.refusals)]


def _lines_of_commits(runs: Sequence[CommitFigures]) -> list[str]:
    if not runs:
        return []
    head = f"{'batch':>7}{'waiting':>9}{'schedulers':>12}{'steps/s':>9}{'tokens/s':>10}"
    head += f"{'scheduler us/token':>20}{'alone/s':>9}{'Redis us/token':>16}{'alone/s':>9}{'bytes waiting':>15}"
    rows = [
        f"{run.batch_size:>7}{run.waiting:>9}{run.schedulers:>12}"
        f"{run.steps / run.seconds:>9.0f}{run.tokens / run.seconds:>10.0f}"
        f"{1e6 * run.scheduler_s / run.tokens:>20.1f}{run.schedulers * run.tokens / run.scheduler_s:>9.0f}"
        f"{1e6 * run.redis_s / run.tokens:>16.1f}{run.tokens / run.redis_s:>9.0f}"
        f"{run.waiting_bytes or '-':>15}"
        for run in runs
    ]
    return [
        "Committed: every log has the engine's tokens in order, and ended once. alone: a processor for each process.",
        head,
        *rows,
    ]


def _lines_of_events(runs: Sequence[StreamFigures]) -> list[str]:
    if not runs:
        return []
    head = f"{'streams':>7}{'waiting':>9}{'gateways':>10}{'asked/s':>9}{'events/s':>10}"
    head += f"{'gateway us/event':>20}{'alone/s':>9}{'Redis us/event':>16}{'scheduler':>11}{'reads/event':>13}"
    rows = [
        f"{run.streams:>7}{run.waiting:>9}{run.gateways:>10}{run.tokens_per_s:>9.0f}{run.events / run.seconds:>10.0f}"
        f"{1e6 * run.gateway_s / run.events:>20.1f}{run.gateways * run.events / run.gateway_s:>9.0f}"
        f"{1e6 * run.redis_s / run.events:>16.1f}{1e6 * run.scheduler_s / run.events:>11.1f}"
        f"{run.pieces / run.events:>13.2f}"
        for run in runs
    ]
    return ["Streamed: every stream has each event once, in order, with the text of the engine's tokens.", head, *rows]


def to_json(figures: HostFigures) -> dict[str, Any]:
    """Return the figures as plain data."""
    return asdict(figures)
