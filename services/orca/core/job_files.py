"""Files that Jobs of the operator (`orca profile`, `orca plan`, `orca follow`) leave in the pool for a ConfigMap."""

import json
import re
from collections.abc import Mapping

PROFILE_FILE = "profile.json"
"""The profile, as `orca profile` writes it."""
PLAN_FILE = "plan.json"
"""The plan, as `orca plan` writes it."""
SUMMARY_FILE = "summary"
"""The plan in one line, for people."""
SHORTFALL_FILE = "shortfall"
"""One line for people about a goal that no plan meets, with the best that is achievable. The file is there only then.

The line ends without a full stop, and says nothing about the plan that serves: the reader adds it.
"""
REPORT_FILE = "report.json"
"""The report on the plan, with its figures on the lengths of now (plan_report.py)."""
STATE_FILE = "state.json"
"""The state of following a plan, as `orca follow` writes it, for the next check."""

BODY_BYTES_MAX = 900_000
"""Most bytes of all files on their way. A ConfigMap holds a MiB."""

_NAME = re.compile(r"[-._a-zA-Z0-9]{1,253}")


def to_body(files: Mapping[str, str]) -> bytes:
    """Return the files as one text. Args: files: their texts by name."""
    return json.dumps(files, ensure_ascii=False).encode()


def read_files(body: bytes) -> dict[str, str]:
    """Return the files that `to_body` was given. Raises: ValueError if it is anything else."""
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"the result has {len(body)} bytes, more than {BODY_BYTES_MAX}")
    found = json.loads(body)
    if not isinstance(found, dict) or not found:
        raise ValueError("the result is not an object with files")
    for name, text in found.items():
        if not _NAME.fullmatch(name) or not isinstance(text, str):
            raise ValueError(f"the result has something else than a text as {name[:60]!r}")
    return found
