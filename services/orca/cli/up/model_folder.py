"""Finds the folder of the model that `--model` names: one on this machine, or one fetched from the hub once."""

import re
from pathlib import Path

from orca.core.errors import ModelError

# What a served folder is made of: never pickled weights, never code.
FETCHED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]


def find_model_folder(model: str) -> Path:
    """The folder itself, or the hub's copy of `owner/name` in the user's cache.

    Raises: ModelError when it is neither, or cannot be fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"--model {model} is a file; a folder in Hugging Face layout is needed")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        raise ModelError(f"--model {model} is not a folder")
    return _fetch(model)


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=FETCHED_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"--model {name} is not a folder, and could not be fetched by that name: {reason}") from error
