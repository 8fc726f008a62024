"""The small models that ship with Orca, so that the first request works without a download (see README.md)."""

from pathlib import Path

CONTINUES, RESTORES = "orca-austen", "orca-restore"
SMALL_MODELS = (CONTINUES, RESTORES)


def small_model_folder(name: str = CONTINUES) -> Path:
    """Return the folder of a small model, in a checkout and in an installed wheel."""
    return Path(__file__).parent / name
