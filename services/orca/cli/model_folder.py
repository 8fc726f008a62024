"""Finds the model that `--model` names: a folder on this machine, or one fetched from the Hugging Face hub once."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from orca.core.domain.errors import ModelError

# What a served folder is made of: never pickled weights, never code, and the weights once: some repositories hold them
# a second time in their makers' own layout, or for other programs in folders of their own.
FETCHED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
LEFT_FILES = ["consolidated*", "*/*"]


def is_fetched(name: str) -> bool:
    """Whether a file of that name, as a repository lists it, is part of a served folder."""
    return any(fnmatchcase(name, each) for each in FETCHED_FILES) and not any(
        fnmatchcase(name, each) for each in LEFT_FILES
    )


def find_model(model: str) -> tuple[Path, str]:
    """A folder in Hugging Face layout: `model` itself, or the copy of the hub's `owner/name` in the user's cache.

    Returns: it, and what clients call the model: the folder's own name, or the hub's.
    Raises: ModelError when it is neither, or cannot be fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder, folder.resolve().name
    if folder.exists():
        raise ModelError(f"--model {model} is a file; a folder in Hugging Face layout is needed")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        raise ModelError(f"--model {model} is not a folder")
    return _fetch(model), model


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=FETCHED_FILES, ignore_patterns=LEFT_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"--model {name} is not a folder, and could not be fetched by that name: {reason}") from error
