"""Checks the token ids that a client sends."""

from typing import Any

from orca.core.domain.errors import InvalidRequest
from orca.gateway.errors import shown


def is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def check_token_ids(ids: Any, vocab_size: int, *, param: str) -> None:
    """Check that a value is a list of token ids. Raises: InvalidRequest that names the first that is none."""
    if not isinstance(ids, list):
        raise InvalidRequest(f"{param}: must be text or a list of token ids, not {shown(ids)}", param=param)
    # Faster than a comparison for each of a million ids.
    if set(map(type, ids)) <= {int} and (not ids or 0 <= min(ids) <= max(ids) < vocab_size):
        return
    bad = next(each for each in ids if type(each) is not int or not 0 <= each < vocab_size)
    message = f"{param}: {shown(bad)} is not a token id of this model (0 to {vocab_size - 1})"
    raise InvalidRequest(message, param=param)
