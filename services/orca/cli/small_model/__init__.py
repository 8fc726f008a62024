"""The small model that ships with Orca, so that the first request works without a download (see its README.md)."""

from pathlib import Path


def small_model_folder() -> Path:
    """Return the model's folder, in a checkout and in an installed wheel."""
    return Path(__file__).parent / "orca-austen"
