"""The lengths that a plan is made for: stated ones, or those of the answers that the pool has counted."""

from collections.abc import Mapping
from pathlib import Path

from orca.cli.up.plan import DEPLOYMENT
from orca.cli.up.slo.settings import SloSettings
from orca.core.domain.errors import SettingError
from orca.core.domain.model import ModelInfo
from orca.planner.search.profiled_problem import fitting
from orca.planner.workload.counted import counted_workload
from orca.planner.workload.lengths_file import read_workload
from orca.planner.workload.workload import Workload, parse_workload
from orca.pool.latency_counts import LatencyCounts
from orca.pool.length_bins import HALF_LIFE_S
from orca.pool.measured import ANSWERS_MIN
from orca.pool.records import LengthCounts
from orca.pool.settings import parse_pool_settings


def stated_lengths(settings: SloSettings, model: ModelInfo) -> Workload | None:
    """Return the lengths that the user states; None if there are none.

    Raises: SettingError that names the option, also if the model does not allow so long requests.
    """
    file, text = settings.slo_lengths, settings.slo_workload
    if file is None and text is None:
        return None
    name = "--slo-workload" if file is None else "--slo-lengths"
    try:
        workload = parse_workload(text or "") if file is None else read_workload(Path(file))
        return fitting(workload, model.max_model_len, is_encoder_decoder=model.encoder_decoder is not None)
    except (SettingError, ValueError) as error:
        raise SettingError(f"setting {name}: {error}") from error


async def read_counts(url: str, revision: str, environment: Mapping[str, str]) -> tuple[LengthCounts, LatencyCounts]:
    """Return the lengths and the latencies of a revision's answers.

    Args: environment: has the login of the pool.
    Raises: PoolUnavailable, SettingError if the pool cannot be read.
    """
    # The import takes 0.1 s. A start with stated lengths does not need it.
    from orca.pool.redis.pool import open_redis_pool

    pool = await open_redis_pool(url, DEPLOYMENT, parse_pool_settings(environment))
    try:
        return await pool.lengths(revision), await pool.latencies(revision)
    finally:
        await pool.close()


def counted_lengths(counts: LengthCounts) -> Workload | None:
    """Return the counted lengths; None if they are of too few answers for a plan."""
    if counts.answers < ANSWERS_MIN:
        return None
    return counted_workload(counts, half_life_s=HALF_LIFE_S, source="the pool")


def missing_lengths(counts: LengthCounts) -> str:
    """Return the reason why there is no plan, and what to do."""
    found = "1 answer was" if counts.answers == 1 else f"{counts.answers} answers were"
    return (
        f"{found} counted in the last four hours, and a plan needs {ANSWERS_MIN}: state the lengths with --slo-workload"
        " PROMPT/OUTPUT or --slo-lengths FILE, or start again later"
    )
