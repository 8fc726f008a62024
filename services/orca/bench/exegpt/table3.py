"""Table 3: the 99th percentile of the outputs, which follows from mean, deviation and maximum."""

from orca.bench.exegpt.rows import PaperRow
from orca.bench.exegpt.setups import PERCENT, workload_of
from orca.planner.workload.tasks import PAPER_P99


def table3_rows() -> list[PaperRow]:
    """Return the percentile of every task. One token more or less is a matter of rounding."""
    return [
        PaperRow(
            what="99th percentile of the outputs",
            unit="tokens",
            settings={"task": task},
            ours=workload_of(task).outputs.percentile(PERCENT),
            paper=paper,
            goal=(paper - 1, paper + 1),
        )
        for task, paper in PAPER_P99.items()
    ]
