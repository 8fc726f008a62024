"""The figures of `orca bench host` for the benchmark pages."""

from collections.abc import Iterator

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.host.commits import CommitFigures
from orca.bench.host.events import StreamFigures
from orca.bench.host.refusals import RefusalFigures
from orca.bench.host.run import HostFigures

_US = 1e6


def figures(found: HostFigures) -> list[Measured]:
    """Return what schedulers committed, what gateways streamed, and what refused requests cost their neighbours."""
    commits = [figure for run in found.commits for figure in _committed(run)]
    events = [figure for run in found.events for figure in _streamed(run)]
    return commits + events + [figure for run in found.refusals for figure in _refused(run)]


def _committed(run: CommitFigures) -> Iterator[Measured]:
    settings: dict[str, Setting | None] = {
        "batch": run.batch_size,
        "waiting": run.waiting,
        "schedulers": run.schedulers,
        "step_us": run.step_us or None,
    }
    alone, redis_alone = run.schedulers * run.tokens / run.scheduler_s, run.tokens / run.redis_s
    yield measured("Tokens committed per second", run.tokens / run.seconds, "tokens/s", settings)
    yield measured("Scheduler time per token", run.scheduler_s / run.tokens, "us", settings, scale=_US)
    yield measured("Redis time per token", run.redis_s / run.tokens, "us", settings, scale=_US)
    yield measured("Tokens per second if each scheduler had a processor", alone, "tokens/s", settings)
    yield measured("Tokens per second if Redis had a processor", redis_alone, "tokens/s", settings)
    if run.waiting_bytes is not None:
        yield measured("Memory of Redis per waiting request", run.waiting_bytes, "bytes", settings)


def _streamed(run: StreamFigures) -> Iterator[Measured]:
    settings: dict[str, Setting | None] = {
        "streams": run.streams,
        "waiting": run.waiting,
        "gateways": run.gateways,
        "asked_per_s": int(run.tokens_per_s),
    }
    alone, redis_alone = run.gateways * run.events / run.gateway_s, run.events / run.redis_s
    yield measured("Events per second", run.events / run.seconds, "events/s", settings)
    yield measured("Gateway time per event", run.gateway_s / run.events, "us", settings, scale=_US)
    yield measured("Redis time per event", run.redis_s / run.events, "us", settings, scale=_US)
    yield measured("Events per second if each gateway had a processor", alone, "events/s", settings)
    yield measured("Events per second if Redis had a processor", redis_alone, "events/s", settings)


def _refused(run: RefusalFigures) -> Iterator[Measured]:
    settings: dict[str, Setting | None] = {
        "clients": run.clients,
        "bad_prompts": 2 * run.bad_prompts,
        "seconds_between_two": run.interval_s,
        "step_us": run.step_us,
    }
    alone, beside = run.undisturbed_p99_s, run.disturbed_p99_s
    yield measured("p99 gap between tokens, undisturbed", alone, "ms", settings, scale=1000)
    yield measured("p99 gap between tokens beside bad prompts", beside, "ms", settings, scale=1000)
    yield measured("Ratio of the two p99 gaps", run.ratios, "x", settings)
