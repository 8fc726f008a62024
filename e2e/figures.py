"""Figures of scenarios: printed, and collected in one file for the documentation."""

import json
import os
from pathlib import Path

from cluster.machine.cache import cache_folder
from target import read_settings


def figures_file() -> Path:
    """Return `$ORCA_E2E_FIGURES`, or a file in the cache folder; it has one JSON object per line."""
    return Path(read_settings(os.environ).figures or cache_folder() / "e2e-figures.jsonl")


def record_figures(scenario: str, figures: object) -> None:
    """Print the figures of a scenario and append them to the file."""
    line = json.dumps({"scenario": scenario, "figures": figures})
    print(line)
    with figures_file().open("a") as file:
        file.write(line + "\n")
