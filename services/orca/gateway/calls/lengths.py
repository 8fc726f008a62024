"""The lengths of a call: what its model's positions and context allow, and what fits into the promised slots.

A decoder-only model has one bound: its context, for prompt and output. An encoder-decoder model may also have a bound
of the source and one of the target, which is the beginning and then the output. Its context bounds the sum of all.
"""

from dataclasses import dataclass

from orca.core.domain.model import ModelInfo
from orca.gateway.calls.target import PREFIX
from orca.gateway.errors import context_error, source_error, target_error


@dataclass(frozen=True, slots=True)
class InputLengths:
    """The tokens that a request has before its first output token."""

    prompt: int  # source of an encoder-decoder model
    beginning: int = 0  # of the target
    prefix: int = 0  # those of the beginning that the call gives


def check_prompt_length(tokens: int, info: ModelInfo, asked: int | None, *, param: str) -> None:
    """Refuse a prompt that leaves no room for a token. Args: asked: the output that the call asks for, if it does.

    Raises: ApiError.
    """
    source_max = None if info.encoder_decoder is None else info.encoder_decoder.source_positions
    if source_max is not None and tokens > source_max:
        raise source_error(source_max, tokens, param=param)
    if tokens >= info.max_model_len:
        raise context_error(info.max_model_len, tokens, asked, param=param)


def check_room(lengths: InputLengths, info: ModelInfo, asked: int | None, *, param: str) -> int:
    """Return the most output tokens that the model allows. Args: asked: the output that the call asks for, if it does.

    Raises: ApiError if it allows none.
    """
    room = info.max_model_len - lengths.prompt - lengths.beginning
    target_max = _target_max(info)
    if target_max is not None:
        room = min(room, target_max - lengths.beginning)
    if room >= 1:
        return room
    # Name what has to become shorter.
    if lengths.prefix and room + lengths.prefix >= 1:
        param = PREFIX
    if target_max is not None and lengths.beginning >= target_max:
        raise target_error(target_max, lengths.beginning, None, param=param)
    raise context_error(info.max_model_len, lengths.prompt, asked, param=param, beginning=lengths.beginning)


def check_output_length(lengths: InputLengths, asked: int, info: ModelInfo, *, param: str) -> None:
    """Refuse more output tokens than the model allows. Args: param: field that asks for them. Raises: ApiError."""
    target_max = _target_max(info)
    if target_max is not None and lengths.beginning + asked > target_max:
        raise target_error(target_max, lengths.beginning, asked, param=param)
    if lengths.prompt + lengths.beginning + asked > info.max_model_len:
        raise context_error(info.max_model_len, lengths.prompt, asked, param=param, beginning=lengths.beginning)


def _target_max(info: ModelInfo) -> int | None:
    return None if info.encoder_decoder is None else info.encoder_decoder.target_positions
