"""The options of rotary position embedding (RoPE) in a config.json, and the context length that follows from them.

transformers 4 writes `rope_scaling` and `rope_theta`, transformers 5 writes `rope_parameters`. If both are there,
transformers reads `rope_scaling`. The context length is derived as vLLM derives it, because transformers has no limit:

    linear, dynamic               factor x max_position_embeddings
    yarn                          factor x original_max_position_embeddings
    llama3, longrope (su), none   max_position_embeddings, which counts the scaling already
"""

import math
from collections.abc import Mapping
from typing import Any

LENGTH_TYPES = ("dynamic", "longrope")
"""Types that turn a key by the length of the sequence too, not by its position alone."""

ORIGINAL_POSITIONS = "original_max_position_embeddings"


def rope_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a config's RoPE as transformers merges them; `rope_type` is always among them.

    Values are as the file has them: nothing is checked.
    """
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    options = dict(found) if isinstance(found, Mapping) else {}
    kind = options.pop("type", None)
    kind = options.get("rope_type") or kind or "default"
    options["rope_type"] = "longrope" if kind == "su" else kind
    if (original := config.get(ORIGINAL_POSITIONS)) is not None:
        options[ORIGINAL_POSITIONS] = original
    return options


def scaled_positions(config: Mapping[str, Any], positions: int) -> int:
    """Return the context length of a model with RoPE.

    Args:
        positions: its max_position_embeddings.
    """
    options = rope_options(config)
    factor: Any = options.get("factor")
    if options["rope_type"] not in ("linear", "dynamic", "yarn") or not _is_positive(factor):
        return positions
    if options["rope_type"] == "yarn":
        original: Any = options.get(ORIGINAL_POSITIONS)  # 32768.0 too, as worker.models.config reads it
        positions = int(original) if _is_positive(original) else positions
    return max(1, int(positions * float(factor)))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and math.isfinite(value)
