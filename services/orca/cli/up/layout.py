"""Chooses the options that the user left unset: threads, chunks of prompts, prefetch and commit interval. Pure.

The default is one stage: stages take turns, while threads share each matrix product. With three or more processors,
one is left to tokenizing, HTTP and scheduling, and the others compute; with one or two, all compute. No process is
bound to a processor: gateways and schedulers sometimes need more than one, and only the kernel sees when.
"""

from dataclasses import replace

from orca.cli.up.settings import UpSettings
from orca.core.domain.step_tokens import max_batch_tokens

SMALL_PARAMETERS = 12_000_000
"""A smaller model is fastest on one thread: two would wait for each other longer than they compute (bench)."""

LARGE_PARAMETERS = 200_000_000
"""A larger model gets no second batch in flight if all parts share the processors. A batch that waits behind the
running one hides the round trip to the master, but a new request waits one step longer. The first effect is larger at
63 M parameters, the second at 519 M (bench/peers).
"""

SHARED_COMMIT_INTERVAL_MS = 50
"""Interval if a commit and the work after it take time from the engine: 20 per second look smooth (bench/peers)."""


def with_layout(settings: UpSettings, *, parameters: int, processors: int) -> UpSettings:
    """Return the settings with every unset option chosen. Options that the user set stay as they are.

    Args:
        parameters: number of parameters of the model.
        processors: number of processors that the system may keep busy.
    """
    threads = threads_per_rank(settings.ranks, parameters=parameters, processors=processors)
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
    """Return whether ranks compute on all processors, so that work of any other part takes time from them.

    Args: threads: compute threads of all ranks together.
    """
    return device == "cpu" and (processors <= 2 or threads >= processors)


def describe(settings: UpSettings, *, parameters: int, processors: int) -> str:
    """Describe the choice of `with_layout` and the reason: `1 stage x 2 threads (63 M parameters, 2 processors)`."""
    levels = [(settings.replicas, "group"), (settings.stages, "stage"), (settings.tensor, "rank")]
    layers = {"stage": f" of {settings.layers} layers"} if settings.layers is not None else {}
    shape = [
        f"{_counted(number, word)}{layers.get(word, '')}" for number, word in levels if number > 1 or word == "stage"
    ]
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
    """Describe the choice of `with_layout` for steps and commits: `prefetch 1, commits every 50 ms`."""
    interval_ms = settings.commit_interval_ms
    return f"prefetch {settings.prefetch}, commits {f'every {interval_ms} ms' if interval_ms else 'at once'}"


def threads_per_rank(ranks: int, *, parameters: int, processors: int) -> int:
    """Return threads so that all ranks together have no more threads than processors, but at least one per rank."""
    if parameters < SMALL_PARAMETERS:
        return 1
    return max(1, computing_processors(processors) // ranks)


def computing_processors(processors: int) -> int:
    """Return the processors that ranks compute on; with three or more, one is left to the other parts."""
    return processors if processors <= 2 else processors - 1


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _rounded(number: int) -> str:
    """Format a count with two or three digits: 2.8 M, 63 M, 7.2 B."""
    value, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
