"""The page of commands, options and variables, from the settings records of each part."""

import ast
import dataclasses
from pathlib import Path
from typing import Any

from orca.cli import follow, keys, plan, pool, profile
from orca.cli.fetch import settings as fetch
from orca.cli.main import COMMANDS
from orca.cli.up.settings import KEYS_FILE_VARIABLE, KEYS_VARIABLE, UpSettings
from orca.core.process.settings import ordered_fields, show_default
from orca.gateway import settings as gateway
from orca.operator import settings as operator
from orca.pool import settings as pool_settings
from orca.scheduler import settings as scheduler
from orca.worker import settings as worker
from reference.tables import code, sentence, table

_HEAD = """# Commands and variables

`orca COMMAND --help` prints the options of one command. An option wins over its variable, and a variable wins over the
default. An unknown option, an unknown variable with a known prefix, or a bad value stops the start with the name of the
option or variable.

A switch may be given without a value: `--open-to-network` is `--open-to-network true`.

"""
_UP = f"""`orca up` starts all parts on this machine. Its own options are no variables, except `{KEYS_VARIABLE}` and
`{KEYS_FILE_VARIABLE}`. It passes variables of gateway, scheduler, worker and pool on to them. What `orca up` sets
itself (ports, model, stages, batch size, and what has an option here) wins over a variable, unless the option has no
value. The first lines of the start name the variables that have no effect for this reason.

"""
_POOL = """All parts of a deployment get the same variables. They have no options. Times run in the pool's awake time
unless they say otherwise.

"""


def page() -> str:
    parts = [
        _HEAD,
        table(
            ["Command", "What it does"],
            [(f"`orca {name}`", sentence(command.help)) for name, command in COMMANDS.items()],
        ),
        "`orca --version` prints the version and the commit.\n\n",
        _section("orca up", UpSettings, "", _UP),
        _section("Gateway", gateway.GatewaySettings, gateway.PREFIX, "`orca gateway` runs one gateway.\n\n"),
        _section(
            "Scheduler",
            scheduler.SchedulerSettings,
            scheduler.PREFIX,
            "`orca scheduler` runs the scheduler of one group.\n\n",
        ),
        _section("Worker", worker.WorkerSettings, worker.PREFIX, "`orca worker` runs one stage.\n\n"),
        "## Pool\n\n" + _POOL + table(["Variable", "Default", "Meaning"], _pool_rows()),
        _section(
            "Operator", operator.OperatorSettings, operator.PREFIX, "`orca operator` is started by the chart.\n\n"
        ),
        _section(
            "Fetch",
            fetch.FetchSettings,
            fetch.PREFIX,
            "`orca fetch` brings a model into a folder. The operator runs it as a Job.\n\n",
        ),
        "## orca keys make\n\n`orca keys make NAME` makes an API key.\n\n" + table(["Option", "Meaning"], _key_rows()),
        _section(
            "orca pool",
            pool.PoolCommandSettings,
            "",
            "`orca pool stats`, `orca pool schema [N]` and `orca pool acl`."
            " [What `stats` prints](../operations/monitoring.md#look-into-the-pool).\n\n",
        ),
        _section(
            "orca pool lengths",
            pool.PoolCountsSettings,
            "",
            "`orca pool lengths` prints how long prompts and answers were in the last four hours. `orca pool latencies`"
            " prints how long the answers took, and takes the same options.\n\n",
        ),
        _section(
            "orca profile",
            profile.ProfileSettings,
            profile.PREFIX,
            "`orca profile` measures a model for the [planner](../how-to/plan.md).\n\n",
        ),
        _section(
            "orca plan",
            plan.PlanSettings,
            plan.PREFIX,
            "`orca plan` finds the [schedule for a latency bound](../how-to/plan.md).\n\n",
        ),
        _section(
            "orca follow",
            follow.FollowSettings,
            follow.PREFIX,
            "`orca follow` checks a [plan in force](../how-to/plan.md#check-a-plan-in-force) once.\n\n",
        ),
        "## orca bench, orca simulate\n\n`orca bench --help` lists the measurements, ",
        "`orca bench NAME --help` lists the options of one.\n",
    ]
    return "".join(parts)


def _section(title: str, record: type[Any], prefix: str, text: str) -> str:
    head = ["Option and variable" if prefix else "Option", "Default", "Meaning"]
    return f"## {title}\n\n{text}" + table(head, (_row(field, prefix) for field in ordered_fields(record)))


def _row(field: "dataclasses.Field[Any]", prefix: str) -> tuple[str, str, str]:
    option = code("--" + field.name.replace("_", "-"))
    variable = f"\n{code(prefix + field.name.upper())}" if prefix else ""
    default = "required" if field.default is dataclasses.MISSING else code(_shown(field.default))
    bounds = ""
    if field.metadata["choices"]:
        bounds = f". One of {', '.join(map(code, field.metadata['choices']))}"
    elif field.metadata["least"] is not None:
        bounds = f". At least {field.metadata['least']}"
    return option + variable, default, sentence(field.metadata["help"]) + bounds + "."


def _shown(default: object) -> object:
    return str(default).lower() if isinstance(default, bool) else show_default(default)


def _pool_rows() -> list[tuple[str, str, str]]:
    """Return a row for each field; its meaning is the text below it."""
    [record] = [
        node
        for node in ast.parse(Path(pool_settings.__file__).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "PoolSettings"
    ]
    rows = []
    for field, text in zip(record.body, record.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if not isinstance(text, ast.Expr) or not isinstance(text.value, ast.Constant):
            raise ValueError(f"the pool setting {field.target.id} has no text below it")
        name = field.target.id
        default = getattr(pool_settings.PoolSettings(), name)
        rows.append((code(f"ORCA_POOL_{name.upper()}"), code(_shown(default)), sentence(str(text.value.value))))
    return rows


def _key_rows() -> list[tuple[str, str]]:
    [actions] = [action.choices for action in keys._parser()._actions if isinstance(action.choices, dict)]
    options = [action for action in actions["make"]._actions if action.help and action.dest != "help"]
    return [(code((action.option_strings or [action.metavar])[0]), sentence(action.help) + ".") for action in options]
