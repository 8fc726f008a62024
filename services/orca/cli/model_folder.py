"""Finds the model that `--model` names: a folder, a model that ships with Orca, smollm2, or one of the hub."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from orca.cli.small_model import SMALL_MODELS, small_model_folder
from orca.cli.smollm2.folder import SMOLLM2, smollm2_folder
from orca.core.domain.errors import ModelError

# The files of a served folder: no pickled weights and no code. The weights are taken once: some repositories hold them
# a second time in their authors' own layout, or for other programs in subfolders.
FETCHED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
SKIPPED_FILES = ["consolidated*", "*/*"]

_SHIPPED = f"a model that ships with Orca ({', '.join(SMALL_MODELS)}) nor {SMOLLM2}"


def is_fetched(name: str) -> bool:
    """Return whether a file, named as its repository lists it, is part of a served folder."""
    return any(fnmatchcase(name, pattern) for pattern in FETCHED_FILES) and not any(
        fnmatchcase(name, pattern) for pattern in SKIPPED_FILES
    )


def find_model(model: str) -> tuple[Path, str]:
    """Find a folder in Hugging Face layout: `model` itself, a model that ships, or one in the user's cache.

    A folder comes before a model that ships or smollm2, and these come before a model of the hub.

    Returns: the folder, and the model's name for clients: that of the folder or of the hub.
    Raises: ModelError when it is none of them, or when it cannot be fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder, folder.resolve().name
    if model in SMALL_MODELS and small_model_folder(model).is_dir():
        return small_model_folder(model), model
    if model == SMOLLM2:
        return smollm2_folder(), model
    if folder.exists():
        raise ModelError(f"--model {model} is a file; give a folder in Hugging Face layout")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        raise ModelError(f"--model {model} is neither a folder nor {_SHIPPED}")
    return _fetch(model), model


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=FETCHED_FILES, ignore_patterns=SKIPPED_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0]
        found = f"--model {name} is neither a folder nor {_SHIPPED}, and the hub could not provide it: {reason}"
        raise ModelError(found) from error
