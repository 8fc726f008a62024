"""The page of the chart's values, from values.yaml and the comments in it."""

import json

from reference.tables import code, table
from values_table import CHART, read_values

_HEAD = """# Chart values

Values of the Helm chart [`charts/orca`](../../charts/orca/README.md). A schema refuses unknown names and wrong types.

"""


def page() -> str:
    values = read_values((CHART / "values.yaml").read_text())
    rows = [(code(value.path), code(json.dumps(value.default)), value.meaning) for value in values]
    return _HEAD + table(["Value", "Default", "Meaning"], rows)
