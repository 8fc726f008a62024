"""Shows a profile as a table of a few lines, for people."""

from collections.abc import Iterator
from statistics import median

from orca.planner.profile.profile import Curve, DegreeTimes, HostLoad, Profile, StackTimes, Surface


def lines(profile: Profile) -> list[str]:
    """Return what was measured, in how many repeats, with which spread, and some of the times."""
    key = profile.key
    layers = " + ".join(str(stack.layers) for stack in key.stacks)
    threads = f"{key.threads} thread{'' if key.threads == 1 else 's'}"
    found = [
        f"{key.architecture}, {layers} layers of {key.hidden_size}, {key.quantization or key.dtype}",
        f"{key.processor}: {key.devices} at the same time with {threads} each",
        f"measured in {profile.seconds:.0f} s, key {profile.digest}",
        "",
        f"{'ranks':>5}  {'part':<26}{'points':>7}{'repeats':>9}{'spread':>8}   microseconds",
    ]
    for degree in profile.degrees:
        found += [_line(degree.ranks, *row) for row in _rows(degree)]
    if profile.send is not None:
        found.append(_line(1, "send", profile.send, "bytes"))
    if profile.host is not None:
        found += ["", *_host_lines(profile.host)]
    return found


def _host_lines(load: HostLoad) -> Iterator[str]:
    yield "processor time outside the ranks, in microseconds:"
    for name, time in (("gateway, scheduler, Redis", load.service), ("controller of each stage", load.controller)):
        yield f"  {name:<26}{time.step_us:.0f} a step, {time.row_us:.0f} a row, {time.answer_us:.0f} an answer"


def _rows(degree: DegreeTimes) -> Iterator[tuple[str, Curve | Surface, str]]:
    names = ("encoder layer", "decoder layer") if len(degree.stacks) > 1 else ("layer",)
    for name, stack in zip(names, degree.stacks, strict=True):
        yield from _stack_rows(name, stack)
    yield "embedding", degree.embed, "rows"
    yield "head and sampling", degree.head, "rows"
    yield "step", degree.step, "requests"
    if degree.all_reduce is not None:
        yield "all-reduce", degree.all_reduce, "bytes"


def _stack_rows(name: str, stack: StackTimes) -> Iterator[tuple[str, Curve | Surface, str]]:
    yield name, stack.rest, "rows"
    if stack.keep is not None:
        yield f"{name}, keys only", stack.keep, "rows"
    if stack.increments is not None:
        yield "  attention, increments", stack.increments, "rows x context"
    yield "  attention, prompts", stack.prompts, "tokens x start"
    if stack.cross is not None:
        yield "  cross attention", stack.cross, "rows x source"
    if stack.memory is not None:
        yield "  new sources", stack.memory, "source tokens"


def _line(ranks: int, name: str, table: Curve | Surface, unit: str) -> str:
    times = list(table.times) if isinstance(table, Curve) else [time for each in table.curves for time in each.times]
    spread = median(time.spread for time in times)
    shown = ", ".join(_examples(table))
    repeats = min(time.repeats for time in times)
    return f"{ranks:>5}  {name:<26}{len(times):>7}{repeats:>9}{spread:>8.1%}   {shown} {unit}"


def _examples(table: Curve | Surface) -> Iterator[str]:
    """Yield the first, a middle and the last time."""
    for index in sorted({0, len(table.at) // 2, len(table.at) - 1}):
        if isinstance(table, Curve):
            yield f"{table.times[index].us:.0f} at {table.at[index]}"
        else:
            curve = table.curves[index]
            yield f"{curve.times[-1].us:.0f} at {table.at[index]} x {curve.at[-1]}"
