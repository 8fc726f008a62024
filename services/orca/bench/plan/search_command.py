"""`orca bench plan search`: the planner's search against exhaustive search."""

import argparse
import sys

from orca.bench.options import add_output_options, positive, write_figures, write_json
from orca.bench.plan import search_check

HELP = "the planner's search against exhaustive search, on random functions and in the ExeGPT paper's scenarios"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    count = f"random functions to search ({search_check.FUNCTIONS})"
    parser.add_argument("--functions", type=positive(int), default=search_check.FUNCTIONS, metavar="N", help=count)
    most = "scenarios of the paper to search, the first ones of its Figures 6 and 8 (all)"
    parser.add_argument("--scenarios", type=positive(int), metavar="N", help=most)
    add_output_options(parser, can_plot=False)


def act(options: argparse.Namespace) -> int | None:
    """Run both checks and show them. Returns: 1 if a random function is beyond its tolerance."""
    functions = search_check.check_functions(options.functions)
    print("\n".join(search_check.function_lines(functions)))
    found = []
    for result in search_check.check_scenarios(search_check.scenarios()[: options.scenarios]):
        found.append(result)
        text = f"{result.setup}, {result.task}, {result.bound}: {result.evaluated:,} of {result.points:,} points"
        print(f"{text}, {result.seconds:.1f} s", file=sys.stderr, flush=True)
    print("\n".join(search_check.scenario_lines(found)))
    write_json(options.json, search_check.to_json(functions, found))
    write_figures(options, search_check.figures(functions, found))
    is_good = all(each.shortfall <= each.tolerance + 1e-12 and not each.breaks_bound for each in functions)
    return None if is_good else 1
