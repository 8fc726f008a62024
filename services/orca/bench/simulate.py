"""`orca simulate`: runs the real scheduler on simulated stages and virtual time; minutes of a trace take seconds.

Policy, pool and loop are those of the product; only the stages are a cost model. The figures leave out what the cost
model does not know: HTTP, tokenizing and the network.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from orca.bench import curve, report
from orca.bench.curve import CurvePoint
from orca.bench.figures.figure import Setting
from orca.bench.options import (
    add_output_options,
    add_trace_options,
    comma_separated,
    trace_settings,
    trace_spec,
    write_figures,
    write_json,
)
from orca.bench.plot import plot_curves
from orca.bench.sweep import Sweep, run_sweep
from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import SettingError
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.process.command_line import CommandLineParser
from orca.planner.simulate.simulated_run import Simulation
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.policy.cycle import DEFAULT_THRESHOLD_PERCENT, CycleControls
from orca.scheduler.policy.policies import POLICIES
from orca.scheduler.policy.request_level import HABITS, Habits, RequestLevelPolicy
from orca.scheduler.settings import CYCLE_SETTINGS

COMPARED = ("iteration", "request_level")
"""The policies that a sweep compares unless others are named: those that need no further option."""
POLICIES_HELP = f"policies to compare, of {', '.join(POLICIES)} ({','.join(COMPARED)})"

RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Requests/s: from an almost idle 175B model to a saturated one."""

COSTS: Mapping[str, LinearCost] = MappingProxyType(
    {
        # The paper's 175B model on 2 x 8 A100: a token takes its 95 ms through both stages (Figure 9c); 350 GFLOP a
        # token at half of the peak; 4.7 MB of KV a token, 290 GB left for it, read at 12 TB/s by the 8 GPUs of a stage.
        "175b": LinearCost(step_us=45_000, token_us=150, context_ns=200),
        # A llama-type model of 63 M parameters in float32 with packed weights on two cores of a server processor.
        "63m": LinearCost(step_us=5_000, token_us=230, context_ns=1_500),
    }
)
"""Costs of a stage by the name of the simulated engine: estimates from sizes and published figures."""

ENGINES = MappingProxyType(
    {
        "175b": Simulation(
            shape=EngineShape(stages=2, slots=60_000, block_tokens=DEFAULT_BLOCK_TOKENS, max_model_len=2048),
            cost=COSTS["175b"],
        ),
        "63m": Simulation(
            shape=EngineShape(stages=1, slots=32_768, block_tokens=DEFAULT_BLOCK_TOKENS, max_model_len=2048),
            cost=COSTS["63m"],
        ),
    }
)
"""Simulated engines by name. Options override their sizes and costs."""


def main(argv: Sequence[str]) -> int:
    """Run one simulation or a sweep of them. Raises: SettingError for bad options."""
    options = _parser().parse_args(list(argv))
    options.words = ["orca", "simulate", *argv]
    sweep = Sweep(
        spec=trace_spec(options, None),
        policies=known_policies(options.policies),
        baseline=baseline(options),
        cycle=cycle(options),
        max_batch_sizes=options.max_batch_sizes,
        rates=options.rates,
    )
    simulated = replace(simulation(options), baseline=sweep.baseline, cycle=sweep.cycle)
    points = run_sweep(sweep, simulated.measure, lambda text: print(text, file=sys.stderr))
    show(points, options, is_normalised=True, model=None)
    return 0


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="orca simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policies", type=comma_separated(str), default=COMPARED, metavar="A,B", help=POLICIES_HELP)
    add("--max-batch-sizes", type=comma_separated(int), default=(8,), metavar="N,M", help="requests in a batch (8)")
    add("--rates", type=comma_separated(float), default=(2.0,), metavar="X,Y", help="arrival rates in requests/s (2)")
    add_engine_options(parser)
    add_baseline_options(parser)
    add_cycle_options(parser)
    add_trace_options(parser, preset="paper", requests=400)
    add_output_options(parser, can_plot=True)
    return parser


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the simulated engine."""
    add = parser.add_argument_group("simulated engine").add_argument
    add("--simulate", choices=tuple(ENGINES), help="sizes and costs to start from (175b)")
    add("--stages", type=int, metavar="N", help="pipeline stages (inter-layer partitions)")
    add("--slots", type=int, metavar="N", help="KV slots, in tokens")
    add("--max-model-len", type=int, metavar="N", help="longest prompt and output together, in tokens")
    add("--step-us", type=int, metavar="N", help="microseconds of a stage for a step: it reads its weights once")
    add("--token-us", type=int, metavar="N", help="further microseconds per row of the flat tensor")
    add("--context-ns", type=int, metavar="N", help="further nanoseconds per token that attention reads")
    add("--prefetch", type=int, choices=(0, 1), help="batches scheduled ahead; 0 is Algorithm 1 (0)")


def refuse_engine_options(options: argparse.Namespace, *, but: Sequence[str] = ()) -> None:
    """Check that no option of the simulated engine is set for a real one. Raises: SettingError."""
    names = ("simulate", "stages", "slots", "max_model_len", "step_us", "token_us", "context_ns", "prefetch")
    for name in names:
        if name not in but and getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise SettingError(f"{flag} is an option of the simulated engine; add --engine simulated, or leave it out")


def add_baseline_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the policy request_level, for any engine."""
    add = parser.add_argument_group("request_level").add_argument
    add("--microbatch-size", type=int, metavar="N", help="requests in a microbatch (the whole batch)")
    add(
        "--without-habits",
        type=comma_separated(str),
        default=(),
        metavar="A,B",
        help=f"switch off, of {', '.join(HABITS)}",
    )


def baseline(options: argparse.Namespace) -> RequestLevelPolicy:
    """Return the baseline that the options describe. Raises: SettingError."""
    if unknown := sorted(set(options.without_habits) - set(HABITS)):
        raise SettingError(f"--without-habits takes any of {', '.join(HABITS)}, not {', '.join(unknown)}")
    if options.microbatch_size is not None and options.microbatch_size < 1:
        raise SettingError(f"--microbatch-size must be at least 1, not {options.microbatch_size}")
    return RequestLevelPolicy(microbatch_size=options.microbatch_size, habits=Habits.without(options.without_habits))


def add_cycle_options(parser: argparse.ArgumentParser) -> None:
    """Add the controls of the policy rra, for any engine."""
    add = parser.add_argument_group("rra").add_argument
    add("--encode-batch", type=int, metavar="N", help="most requests that enter with an encode iteration")
    add("--decode-steps", type=int, metavar="N", help="decode iterations between two encode iterations")
    add("--decode-batch", type=int, metavar="N", help="planned requests at the start of a decode phase (no plan)")
    add("--encode-tokens", type=int, metavar="N", help="planned prompt tokens of an encode iteration (no plan)")
    threshold = f"deviation from both plans that is left alone ({DEFAULT_THRESHOLD_PERCENT})"
    add("--threshold-percent", type=int, metavar="N", help=threshold)


def cycle(options: argparse.Namespace) -> CycleControls | None:
    """Return the controls of the policy rra; None if no run has this policy. Raises: SettingError."""
    given = {name: getattr(options, name) for name in CYCLE_SETTINGS if getattr(options, name) is not None}
    if "rra" not in options.policies:
        for name in given:
            raise SettingError(f"--{name.replace('_', '-')} is an option of the policy rra; add it to --policies")
        return None
    for name in ("encode_batch", "decode_steps"):
        if name not in given:
            raise SettingError(f"the policy rra needs --{name.replace('_', '-')}")
    return CycleControls(**given)


def simulation(options: argparse.Namespace) -> Simulation:
    """Return the simulated engine that the options describe. Raises: SettingError."""
    engine = options.simulate or "175b"
    base, cost = ENGINES[engine], COSTS[engine]

    def chosen(name: str, default: int) -> int:
        value = getattr(options, name)
        if value is None:
            return default
        if value < (least := 1 if name in ("stages", "slots", "max_model_len") else 0):
            raise SettingError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
        return int(value)

    slots = chosen("slots", base.shape.slots)
    return Simulation(
        shape=EngineShape(
            stages=chosen("stages", base.shape.stages),
            slots=slots - slots % base.shape.block_tokens,
            block_tokens=base.shape.block_tokens,
            max_model_len=chosen("max_model_len", base.shape.max_model_len),
        ),
        cost=LinearCost(
            step_us=chosen("step_us", cost.step_us),
            token_us=chosen("token_us", cost.token_us),
            context_ns=chosen("context_ns", cost.context_ns),
        ),
        prefetch=options.prefetch or 0,
    )


def known_policies(names: Sequence[str]) -> Sequence[str]:
    """Check that all names are policies, and return them. Raises: SettingError."""
    for name in names:
        if name not in POLICIES:
            raise SettingError(f"--policies takes any of {', '.join(POLICIES)}, not {name}")
    return names


def show(points: Sequence[CurvePoint], options: argparse.Namespace, *, is_normalised: bool, model: str | None) -> None:
    """Print, write and draw the results: the whole report of a single run, or the table of a sweep.

    Args: model: name of the model of a real engine; None if the engine was simulated.
    """
    for point in points if len(points) <= 2 else ():
        print(f"{point.curve} at {point.rate:g} requests/s")
        print("\n".join(report.lines(point.report)), end="\n\n")
    for scheduling in dict.fromkeys(point.scheduling for point in points):
        print(scheduling)
    print("\n".join(curve.lines(points, is_normalised=is_normalised)))
    print("\n".join(curve.side_by_side(points, is_normalised=is_normalised)))
    write_json(options.json, curve.points_json(points))
    settings: dict[str, Setting] = {
        "engine": "simulated" if model is None else "real",
        "model": model or options.simulate or "175b",
        "lengths": trace_settings(options, None)["lengths"],
    }
    measured = curve.figures(points, settings, is_normalised=is_normalised)
    write_figures(options, measured, device="virtual time" if model is None else None)
    if options.plot is not None:
        plot_curves(points, options.plot, is_normalised=is_normalised)
