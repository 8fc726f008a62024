"""What `orca up` chooses where it is not told: threads, how much of a prompt runs in a step, prefetch, commits. Pure.

There is one stage unless more are asked for: stages take turns, threads share each product. All processors but one
compute, so that tokenizing, HTTP and scheduling have one of their own; of two or fewer, all do. Which process runs on
which of them is left to the kernel: gateways and schedulers need more than one now and then, and only it sees when.
"""

from dataclasses import replace

from orca.cli.up.settings import UpSettings
from orca.core.domain.step_tokens import max_batch_tokens

SMALL_PARAMETERS = 12_000_000
"""A model with fewer is fastest on one thread: two would wait for each other longer than they compute (cli/bench)."""

LARGE_PARAMETERS = 200_000_000
"""Where all share the processors, a batch that waits behind the running one hides the way to the master and back, and a
request that comes waits for one step more. The first weighs more at 63 M parameters, this at 519 M (bench/peers)."""

SHARED_COMMIT_INTERVAL_MS = 50
"""Where a commit and all that follows it take time from the engine: 20 a second look smooth (bench/peers)."""


def with_layout(settings: UpSettings, *, parameters: int, processors: int) -> UpSettings:
    """The settings with nothing left to choose: what is asked for stays, the rest is chosen around it.

    Args:
        parameters: of the model.
        processors: that the system may keep busy.
    """
    threads = _threads_per_rank(settings.ranks, parameters=parameters, processors=processors)
    bound = max_batch_tokens(
        settings.max_batch_tokens,
        device=settings.device,
        policy=settings.policy,
        max_batch_size=settings.max_batch_size,
    )
    threads = settings.threads or threads
    shared = is_shared(settings.device, threads=settings.ranks * threads, processors=processors)
    prefetch, interval_ms = settings.prefetch, settings.commit_interval_ms
    if prefetch is None:
        prefetch = 0 if shared and settings.stages == 1 and parameters >= LARGE_PARAMETERS else 1
    if interval_ms is None:
        interval_ms = SHARED_COMMIT_INTERVAL_MS if shared else 0
    return replace(settings, threads=threads, max_batch_tokens=bound, prefetch=prefetch, commit_interval_ms=interval_ms)


def is_shared(device: str, *, threads: int, processors: int) -> bool:
    """Do ranks compute on all processors, so that whatever another part does takes time from them?

    Args: threads: of all ranks.
    """
    return device == "cpu" and (processors <= 2 or threads >= processors)


def describe(settings: UpSettings, *, parameters: int, processors: int) -> str:
    """What `with_layout` makes of the same, and why: `1 stage x 2 threads (63 M parameters, 2 processors)`."""
    levels = [(settings.replicas, "group"), (settings.stages, "stage"), (settings.tensor, "rank")]
    shape = [_counted(number, word) for number, word in levels if number > 1 or word == "stage"]
    if settings.device != "cpu":
        return f"{' x '.join(shape)} on {settings.device}"
    chosen = with_layout(settings, parameters=parameters, processors=processors)
    shape.append(_counted(chosen.threads, "thread"))
    reasons = [f"{_rounded(parameters)} parameters", _counted(processors, "processor")]
    if settings.threads:
        reasons.append("threads as asked for")
    elif parameters < SMALL_PARAMETERS:
        reasons[0] += ", too few for more threads"
    elif processors > 2:
        reasons.append("one of them for the other parts")
    return f"{' x '.join(shape)} ({', '.join(reasons)})"


def describe_pace(settings: UpSettings) -> str:
    """What `with_layout` has chosen for steps and commits: `prefetch 1, commits every 50 ms`."""
    interval_ms = settings.commit_interval_ms
    return f"prefetch {settings.prefetch}, commits {f'every {interval_ms} ms' if interval_ms else 'at once'}"


def _threads_per_rank(ranks: int, *, parameters: int, processors: int) -> int:
    """All ranks together have no more than there are processors, unless there are more ranks."""
    if parameters < SMALL_PARAMETERS:
        return 1
    computing = processors if processors <= 2 else processors - 1
    return max(1, computing // ranks)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _rounded(number: int) -> str:
    """Two digits or three: 2.8 M, 63 M, 7.2 B."""
    value, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
