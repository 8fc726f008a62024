"""Figures of scenarios: printed, and kept in one file for whoever writes them down."""

import json
import os
from pathlib import Path

from cluster.machine.cache import cache_folder
from target import read_settings


def figures_file() -> Path:
    """`$ORCA_E2E_FIGURES`, else beside the cluster's cache; a JSON object a line."""
    return Path(read_settings(os.environ).figures or cache_folder() / "e2e-figures.jsonl")


def note(scenario: str, figures: object) -> None:
    line = json.dumps({"scenario": scenario, "figures": figures})
    print(line)
    with figures_file().open("a") as file:
        file.write(line + "\n")
