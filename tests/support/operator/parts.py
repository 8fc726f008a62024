"""The parts of Orca check the flags and variables of their pods: they end at once for a bad one."""

from collections.abc import Callable, Mapping, Sequence

from orca.cli.fetch.settings import parse_settings as parse_fetch
from orca.cli.follow import parse_settings as parse_follow
from orca.cli.plan import parse_settings as parse_plan
from orca.cli.profile import parse_settings as parse_profile
from orca.core.domain.errors import SettingError
from orca.gateway.settings import parse_settings as parse_gateway
from orca.operator.domain.resource import Json
from orca.pool.settings import parse_pool_settings
from orca.scheduler.settings import parse_settings as parse_scheduler
from orca.worker.settings import parse_settings as parse_worker

_PARSERS: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], object]] = {
    "gateway": parse_gateway,
    "scheduler": parse_scheduler,
    "worker": parse_worker,
    "fetch": parse_fetch,
    "profile": parse_profile,
    "plan": parse_plan,
    "follow": parse_follow,
}
_FROM_ELSEWHERE = {
    "ORCA_GATEWAY_POOL": "redis://a.example:6379/0",
    "ORCA_SCHEDULER_POOL": "redis://a.example:6379/0",
    "ORCA_PROFILE_POOL": "redis://a.example:6379/0",
    "ORCA_PLAN_POOL": "redis://a.example:6379/0",
    "ORCA_FOLLOW_POOL": "redis://a.example:6379/0",
    "ORCA_POOL_USER": "orca",
    "ORCA_WORKER_STAGE": "0",
    "ORCA_WORKER_DATA_HOST": "10.0.0.1",
}
"""Variables whose values a cluster fills in."""


def complaint(manifest: Json) -> str | None:
    """Return the error of the part that runs in the pods; None when it accepts them or is not a part of Orca."""
    pod = manifest.get("spec", {}).get("template", {}).get("spec")
    if pod is None:
        return None
    [main] = [each for each in pod["containers"] if each["name"] != "redis"] or [None]
    if main is None:
        return None
    part, *words = main["args"]
    variables = {each["name"]: each["value"] if "value" in each else _given(each) for each in main["env"]}
    ours = {name: value for name, value in variables.items() if name.startswith("ORCA_")}
    try:
        _PARSERS[part](words, ours)
        parse_pool_settings(ours)
    except (SettingError, SystemExit) as error:
        return f"{part} {words}: {error}"
    return None


def _given(variable: Json) -> str:
    return _FROM_ELSEWHERE.get(variable["name"], "from a Secret")
