"""`orca bench deadlines`: the options, and the runs on simulated stages or on real processes."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from orca.bench import simulate
from orca.bench.deadlines import admission, compare, fairness, overhead, table
from orca.bench.deadlines.choices import OrderChoice, choices
from orca.bench.deadlines.engines import OrcaRuns, OrderedRuns, SimulatedRuns
from orca.bench.deadlines.workload import DeadlineMix
from orca.bench.options import add_output_options, comma_separated, positive, write_figures, write_json
from orca.bench.plan.models import add_model_options, check_shapes, chosen_models, report
from orca.core.domain.errors import SettingError
from orca.core.domain.model import load_model_info
from orca.planner.workload.trace import PRESETS
from orca.pool.order.order_rules import Drop, Order, Utility

HELP = "orders of claims: answers in time at several times the capacity (TCB)"

LOADS = (0.5, 1.0, 1.5, 2.0, 3.0)
ENGINES = ("real", "simulated")
REQUESTS = {"real": 800, "simulated": 3_000}
SEEDS = {"real": 3, "simulated": 5}
MINUTES = 10.0
RATES = (50.0, 100.0, 200.0, 400.0, 800.0)
SECONDS = 30.0
ONLY_WITH = {"minutes": "fairness", "rates": "overhead", "seconds": "overhead"}
"""Options that one way to run the bench has alone."""

FAIRNESS_LOAD = 3.0
FAIRNESS_REQUESTS = 1_000
"""Requests of the run that measures the capacity."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--engine",
        choices=ENGINES,
        help="real starts `orca up` itself (real; simulated with --fairness, --admission, --overhead)",
    )
    add_model_options(parser)
    add("--preset", choices=tuple(PRESETS), default="small", help="lengths of the requests (%(default)s)")
    add("--max-batch-size", type=positive(int), default=16, metavar="N", help="requests in a batch (%(default)s)")
    loads = "arrival rates as multiples of the measured capacity (0.5,1,1.5,2,3)"
    add("--loads", type=comma_separated(positive(float)), default=LOADS, metavar="X,Y", help=loads)
    orders = f"orders of claims to compare, of {', '.join(Order)} (all)"
    add("--orders", type=comma_separated(_order), default=tuple(Order), metavar="A,B", help=orders)
    add("--utility", type=Utility, choices=tuple(Utility), default=Utility.EQUAL, help="worth of an answer (equal)")
    add("--drop", type=Drop, choices=tuple(Drop), default=Drop.CERTAIN, help="requests that end too late (certain)")
    etas = "order deadline once for each eta (its default)"
    add("--eta-percents", type=comma_separated(positive(int)), default=(), metavar="N,M", help=etas)
    add("--patience-s", type=positive(int), default=30, metavar="N", help="as in `orca up` (%(default)s)")
    requests = "requests that arrive at load 1; other loads take the same time (real 800, simulated 3000)"
    add("--requests", type=positive(int), metavar="N", help=requests)
    seeds = "runs of each order and load, each with other requests (real 3, simulated 5)"
    add("--seeds", type=positive(int), metavar="N", help=seeds)
    jobs = f"processes that simulate (as many as processors: {_processors()})"
    add("--jobs", type=positive(int), metavar="N", help=jobs)
    instead = parser.add_mutually_exclusive_group()
    waits = "instead: longest waits at 3 times the capacity, with long requests and some without a deadline; simulated"
    instead.add_argument("--fairness", action="store_true", help=waits)
    minutes = "with --fairness: virtual minutes in which requests arrive (10)"
    add("--minutes", type=positive(float), metavar="N", help=minutes)
    verdicts = "instead: how often a gateway is wrong that refuses calls for their deadlines; simulated"
    instead.add_argument("--admission", action="store_true", help=verdicts)
    ratio = "instead: time of claims in Redis beside the time of steps (TCB, Figure 16); simulated stages in real time"
    instead.add_argument("--overhead", action="store_true", help=ratio)
    rates = "with --overhead: arrivals per second (50,100,200,400,800)"
    add("--rates", type=comma_separated(positive(float)), metavar="X,Y", help=rates)
    seconds = "with --overhead: seconds of each run (30)"
    add("--seconds", type=positive(float), metavar="N", help=seconds)
    simulate.add_engine_options(parser)
    add_output_options(parser, can_plot=False)


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _order(text: str) -> Order:
    try:
        return Order(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(Order)}") from None


def act(options: argparse.Namespace, up_options: Sequence[str]) -> int | None:
    """Compare the orders. Raises: SettingError, ModelError, OrcaError."""
    chosen = _choices(options)
    instead = next((name for name in INSTEAD if getattr(options, name)), None)
    for option, name in ONLY_WITH.items():
        if getattr(options, option) is not None and instead != name:
            raise SettingError(f"--{option} is for --{name}")
    engine = options.engine or ("real" if instead is None else "simulated")
    if engine == "simulated":
        _refuse_for_simulated(options, up_options)
    else:
        _refuse_for_real(options, instead)
    if instead is None:
        _compare(options, engine, chosen, up_options)
    else:
        INSTEAD[instead](options, chosen)
    return None


def _choices(options: argparse.Namespace) -> list[OrderChoice]:
    """Return the orders to compare. Raises: SettingError."""
    if len(set(options.orders)) < len(options.orders):
        raise SettingError("--orders names an order twice")
    found = choices(
        options.orders,
        utility=options.utility,
        drop=options.drop,
        etas=options.eta_percents,
        patience_s=options.patience_s,
    )
    for choice in found:
        _ = choice.rules  # refuses an eta out of range
    return found


def _refuse_for_simulated(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    if up_options:
        raise SettingError(f"--engine simulated does not start `orca up`, which could take {' '.join(up_options)}")
    if options.model is not None:
        raise SettingError("--model is for --engine real; --simulate names a simulated engine")


def _refuse_for_real(options: argparse.Namespace, instead: str | None) -> None:
    simulate.refuse_engine_options(options)
    if instead is not None:
        raise SettingError(f"--{instead} runs on simulated stages: leave --engine out")
    if options.jobs is not None:
        raise SettingError("--jobs is for --engine simulated: real runs must have the machine for themselves")


def _compare(
    options: argparse.Namespace, engine: str, chosen: Sequence[OrderChoice], up_options: Sequence[str]
) -> None:
    plan = _plan(options, engine, chosen)
    jobs = (options.jobs or _processors()) if engine == "simulated" else 1
    content, found = {}, []
    with _engines(options, engine, up_options) as engines:
        for each in engines:
            report(f"{each.name}: {len(plan.seeds)} x {len(chosen)} orders x {len(plan.loads)} loads")
            comparison = compare.compare(each.runs, plan, report, jobs=jobs)
            print(each.name)
            print("\n".join(table.lines(comparison, chosen, plan.loads)))
            content[each.name] = table.to_json(comparison)
            found += table.figures(comparison, chosen, plan.loads, _settings(options, engine, each.name))
    write_json(options.json, content)
    write_figures(options, found, device="virtual time" if engine == "simulated" else None)


def _plan(options: argparse.Namespace, engine: str, chosen: Sequence[OrderChoice]) -> compare.ComparisonPlan:
    return compare.ComparisonPlan(
        mix=_mix(options),
        choices=chosen,
        loads=options.loads,
        requests=options.requests or REQUESTS[engine],
        seeds=range(options.seeds or SEEDS[engine]),
    )


def _admission(options: argparse.Namespace, chosen: Sequence[OrderChoice]) -> None:
    scores = admission.measure_admission(_simulated(options), _plan(options, "simulated", chosen), report)
    print("\n".join(admission.lines(scores)))
    write_json(options.json, [asdict(each) for each in scores])
    found = admission.figures(scores, _settings(options, "simulated", _simulated_name(options)))
    write_figures(options, found, device="virtual time")


def _overhead(options: argparse.Namespace, chosen: Sequence[OrderChoice]) -> None:
    plan = overhead.OverheadPlan(
        mix=_mix(options), choices=chosen, rates=options.rates or RATES, seconds=options.seconds or SECONDS
    )
    found = overhead.measure_overhead(_simulated(options), plan, report)
    print("\n".join(overhead.lines(found)))
    write_json(options.json, [asdict(each) for each in found])
    settings = _settings(options, "simulated", _simulated_name(options)) | {"engine": None}
    write_figures(options, overhead.figures(found, settings))


def _fairness(options: argparse.Namespace, chosen: Sequence[OrderChoice]) -> None:
    plan = fairness.FairnessPlan(
        mix=_mix(options, without_deadline=fairness.WITHOUT_DEADLINE, long=fairness.LONG),
        choices=[choice for choice in chosen if choice.order is not Order.ARRIVAL],
        load=FAIRNESS_LOAD,
        seconds=60 * (options.minutes or MINUTES),
        requests=options.requests or FAIRNESS_REQUESTS,
        seed=0,
    )
    waits = fairness.run_fairness(_simulated(options), plan, report)
    print("\n".join(fairness.lines(waits)))
    write_json(options.json, fairness.to_json(waits))
    settings = {**_settings(options, "simulated", _simulated_name(options)), "load": FAIRNESS_LOAD}
    write_figures(options, fairness.figures(waits, settings), device="virtual time")


@dataclass(frozen=True, slots=True)
class NamedRuns:
    """An engine and its name in figures."""

    name: str
    runs: OrderedRuns


@contextmanager
def _engines(options: argparse.Namespace, engine: str, up_options: Sequence[str]) -> Iterator[Iterator[NamedRuns]]:
    """Yield the engines to compare orders on, each ready to run."""
    if engine == "simulated":
        yield iter([NamedRuns(_simulated_name(options), _simulated(options))])
        return
    check_shapes(options)
    with TemporaryDirectory(prefix="orca-deadlines-") as folder:
        yield (
            NamedRuns(model.name, _real(options, model, up_options)) for model in chosen_models(options, Path(folder))
        )


def _simulated(options: argparse.Namespace) -> SimulatedRuns:
    return SimulatedRuns(simulate.simulation(options), options.max_batch_size)


def _real(options: argparse.Namespace, model: Path, up_options: Sequence[str]) -> OrcaRuns:
    return OrcaRuns(
        model=model,
        vocab_size=load_model_info(model).vocab_size,
        max_batch_size=options.max_batch_size,
        up_options=up_options,
    )


def _simulated_name(options: argparse.Namespace) -> str:
    return options.simulate or "175b"


def _mix(options: argparse.Namespace, *, without_deadline: float = 0.0, long: float = 0.0) -> DeadlineMix:
    prompt_tokens, new_tokens = PRESETS[options.preset]
    return DeadlineMix(prompt_tokens=prompt_tokens, new_tokens=new_tokens, without_deadline=without_deadline, long=long)


def _settings(options: argparse.Namespace, engine: str, model: str) -> dict[str, str | int | float | None]:
    """Return the settings that distinguish figures, without those that have their defaults."""
    return {
        "engine": engine,
        "model": model,
        "lengths": options.preset,
        "max_batch": options.max_batch_size,
        "utility": None if options.utility is Utility.EQUAL else options.utility.value,
        "drop": None if options.drop is Drop.CERTAIN else options.drop.value,
        "patience_s": None if options.patience_s == 30 else options.patience_s,
    }


INSTEAD = {"fairness": _fairness, "admission": _admission, "overhead": _overhead}
"""Runs other than a comparison of orders, by the names of their options."""
