"""The page of the chart's values, from values.yaml and the comments in it."""

import json

from reference.tables import code, table
from values_table import CHART, Value, read_values

_HEAD = """# Chart values

Values of the Helm chart [`charts/orca`](../../charts/orca/README.md). A schema refuses unknown names and wrong types.

"""


_DEFAULT_CHARACTERS_MAX = 24


def page() -> str:
    values = read_values((CHART / "values.yaml").read_text())
    return _HEAD + table(["Value", "Default", "Meaning"], map(_row, values))


def _row(value: Value) -> tuple[str, str, str]:
    """Return a row; a default too long for its column stands in the last one."""
    default = code(json.dumps(value.default))
    if len(default) > _DEFAULT_CHARACTERS_MAX:
        return code(value.path), "", f"{value.meaning} Default: {default}."
    return code(value.path), default, value.meaning
