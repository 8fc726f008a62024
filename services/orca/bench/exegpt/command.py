"""`orca bench exegpt ITEM`: the results of the ExeGPT paper on round-robin allocation, by simulation.

table3     99th percentiles of the outputs
table6     OPT 13B, S, 4 A40: efficiencies from one row, the other row predicted
4          timeline of one cycle, from the simulator and from the logs of real stages
6, 8       throughput under four latency bounds, beside FasterTransformer
table5     share of the points at which a control variable is not monotone
table7     ranges of stage times, with and without dynamic adjustment; --real measures them on real stages
10         message catalogues of this machine: plans from a tenth of their lengths run on the others
11         changed output lengths: the old schedule against a new one

Costs come from data sheets (devices.json, models.json) and from efficiencies (efficiencies.json), which table6 finds.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from orca.bench.exegpt import calibration, drift, gains, monotony, real_variance, table3, timeline, variance
from orca.bench.exegpt.catalogues import figure10
from orca.bench.exegpt.catalogues.messages import LANGUAGES, LOCALE
from orca.bench.exegpt.rows import PaperRow, figures, lines, to_json
from orca.bench.exegpt.setups import FIGURES
from orca.bench.options import add_output_options, comma_separated, write_figures, write_json
from orca.core.domain.errors import SettingError

HELP = "the results of the ExeGPT paper on round-robin allocation, by simulation"

REAL_ITEM = "table7"
REAL_SHAPE = "llama-63m"
"""The random model that `table7 --real` runs, a name of peers/model.py."""

Report = Callable[[str], None]
"""Takes a line of progress."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `orca bench exegpt`."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("item", choices=tuple(_ITEMS), metavar="ITEM", help=", ".join(_ITEMS))
    add = parser.add_argument
    add("--formulas-only", action="store_true", help="6 and 8: leave the simulated checks out")
    add("--pictures", type=_folder, metavar="DIR", help="4: write the timelines there as SVG")
    add("--catalogues", type=_folder, default=LOCALE, metavar="DIR", help="10: message catalogues (%(default)s)")
    languages = f"10: languages of the catalogues, comma-separated ({','.join(LANGUAGES)})"
    add("--languages", type=comma_separated(str), default=LANGUAGES, metavar="A,B", help=languages)
    add("--real", action="store_true", help="table7: run two real stages and read their times; takes some minutes")
    model = "10: count tokens with its tokenizer; table7 --real: run it (default: a tokenizer that is learned from the"
    add("--model", type=_folder, metavar="DIR", help=f"{model} messages, and a random model of 63 M parameters)")
    add_output_options(parser, can_plot=False)


def act(options: argparse.Namespace, up_options: Sequence[str]) -> int:
    """Compute one item and show it beside the paper's figures. Returns: 0. Raises: SettingError, OrcaError."""
    if up_options:
        raise SettingError(f"this measurement does not start `orca up`, which could take {' '.join(up_options)}")
    if options.real and options.item != REAL_ITEM:
        raise SettingError(f"--real is for {REAL_ITEM}, not for {options.item}")
    rows = _ITEMS[options.item](options, _report)
    print("\n".join(lines(rows)))
    write_json(options.json, to_json(rows))
    is_real = [row.settings.get("timeline") == "real" for row in rows]
    write_figures(
        options, figures(row for row, real in zip(rows, is_real, strict=True) if not real), device="virtual time"
    )
    write_figures(options, figures(row for row, real in zip(rows, is_real, strict=True) if real))
    return 0


def _table3(options: argparse.Namespace, report: Report) -> list[PaperRow]:  # noqa: ARG001 - every item has this shape
    return table3.table3_rows()


def _table6(options: argparse.Namespace, report: Report) -> list[PaperRow]:  # noqa: ARG001
    found = calibration.calibrations()
    best = calibration.best_of(found)
    report(f"T_P=4 is the layout {best.layout}: {best.source} fit it to {best.misfit('orca'):.1%} on average")
    return calibration.table6_rows(found)


def _gains(options: argparse.Namespace, report: Report) -> list[PaperRow]:
    number = options.item
    return gains.gain_rows(number, FIGURES[number], report, is_simulated=not options.formulas_only)


def _timeline(options: argparse.Namespace, report: Report) -> list[PaperRow]:  # noqa: ARG001
    return timeline.figure4_rows(options.pictures)


def _monotony(options: argparse.Namespace, report: Report) -> list[PaperRow]:  # noqa: ARG001
    return monotony.table5_rows(report)


def _variance(options: argparse.Namespace, report: Report) -> list[PaperRow]:
    if not options.real:
        return variance.table7_rows()
    if options.model is not None:
        return real_variance.real_table7_rows(options.model, report)
    from orca.bench.peers.compare import make_random_model  # torch and safetensors: only here

    with TemporaryDirectory(prefix="orca-table7-") as scratch:
        return real_variance.real_table7_rows(make_random_model(REAL_SHAPE, Path(scratch), report), report)


def _catalogues(options: argparse.Namespace, report: Report) -> list[PaperRow]:
    return figure10.figure10_rows(options.catalogues, options.languages, options.model, report)


def _drift(options: argparse.Namespace, report: Report) -> list[PaperRow]:  # noqa: ARG001
    return drift.figure11_rows(report)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_ITEMS: Mapping[str, Callable[[argparse.Namespace, Report], list[PaperRow]]] = {
    "table3": _table3,
    "table6": _table6,
    "4": _timeline,
    "6": _gains,
    "8": _gains,
    "table5": _monotony,
    "table7": _variance,
    "10": _catalogues,
    "11": _drift,
}
