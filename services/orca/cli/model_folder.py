"""Finds the model that `--model` names: a folder on this machine, or a model of the Hugging Face hub."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from orca.core.domain.errors import ModelError

# The files of a served folder: no pickled weights and no code. The weights are taken once: some repositories hold them
# a second time in their authors' own layout, or for other programs in subfolders.
FETCHED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
SKIPPED_FILES = ["consolidated*", "*/*"]


def is_fetched(name: str) -> bool:
    """Return whether a file, named as its repository lists it, is part of a served folder."""
    return any(fnmatchcase(name, pattern) for pattern in FETCHED_FILES) and not any(
        fnmatchcase(name, pattern) for pattern in SKIPPED_FILES
    )


def find_model(model: str) -> tuple[Path, str]:
    """Find a folder in Hugging Face layout: `model` itself, or the copy of the hub's `owner/name` in the user's cache.

    Returns: the folder, and the model's name for clients: that of the folder or of the hub.
    Raises: ModelError when it is neither, or when it cannot be fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder, folder.resolve().name
    if folder.exists():
        raise ModelError(f"--model {model} is a file; give a folder in Hugging Face layout")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        raise ModelError(f"--model {model} is not a folder")
    return _fetch(model), model


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=FETCHED_FILES, ignore_patterns=SKIPPED_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"--model {name} is not a folder, and the hub could not provide it: {reason}") from error
