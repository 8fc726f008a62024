"""The facts about an encoder-decoder model that gateway, scheduler and stages share.

The source is the prompt; the encoder runs it once. The target is what the decoder runs: its beginning, then the log of
generated tokens. Other models have no source, and their prompt is the beginning of what they run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca.core.domain.errors import ModelError

SOURCE_SLOTS_MAX = 8192
"""Most slots of the sources of one step, each in whole KV blocks, but for a single longer source. A stage has as many
for the keys and values of an encoder layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """The part of a model's description that other models do not have."""

    encoder_layers: int  # of all layers, which are one list: the encoder's, then the decoder's
    start_token_id: int  # decoder_start_token_id: the first token of every target
    forced_bos_token_id: int | None = None  # the second one, unless the call gives a prefix
    forced_eos_token_ids: tuple[int, ...] = ()  # the lowest is the last token of a log of full length
    source_positions: int | None = None  # most tokens of a source; None: any number
    target_positions: int | None = None  # most tokens of a target; None: any number
    padding_token_id: int | None = None
    """The padding of a model that gives positions to all other tokens only (M2M-100). None: padding is like any token.

    transformers does not count padding in a source or prefix, so each later token has an earlier position. Here a
    position is a token's place. So no source and no prefix may have padding, and no target draws it.
    """

    def beginning(self, prefix: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the target before its log, as `generate` of transformers makes it.

        Args:
            prefix: tokens that the call gives; they may start with the start token.
        """
        start, forced = (self.start_token_id,), self.forced_bos_token_id
        if not prefix or tuple(prefix) == start:
            return start if forced is None else (*start, forced)
        return tuple(prefix) if prefix[0] == start[0] else (*start, *prefix)


def read_encoder_decoder(
    folder: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    *,
    encoder_layers: int,
    positions: int | None,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    default_start: int | None = None,
    default_padding: int | None = None,
) -> EncoderDecoder:
    """Read the special tokens of targets, as `generate` does: if there is a generation_config.json, it alone counts.

    If it has no start token, `generate` fails. Then config.json counts for this token. Without a generation_config.json
    `from_pretrained` takes the tokens that config.json names, and none of the defaults of the family's config class,
    such as BART's forced_eos_token_id = 2 (transformers 5.23, GenerationMixin.adjust_generation_fn).

    Args:
        generation: content of generation_config.json; None if there is none.
        positions: most tokens of a source, and of a target; None: any number.
        vocab_size: of the decoder.
        default_start: start token if no file has one.
        default_padding: padding if config.json has none; None: padding is like any token.
    Raises: ModelError that names file and key, for a token outside the vocabulary or if there is no start token.
    """
    sources = {"generation_config.json": generation or {}, "config.json": config}
    main = "config.json" if generation is None else "generation_config.json"

    def ids(name: str, key: str) -> tuple[int, ...]:
        value = sources[name].get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        for token in found:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise ModelError(f"{folder / name}: {key} is {value!r}, not a token id below {vocab_size}")
        return tuple(found)

    starts = (ids(name, key) for name in (main, "config.json") for key in ("decoder_start_token_id", "bos_token_id"))
    start = next(filter(None, starts), () if default_start is None or default_start >= vocab_size else (default_start,))
    if len(start) != 1:
        found = f"it is {list(start)}" if start else "there is none"
        raise ModelError(
            f"{folder / main}: decoder_start_token_id has to be one token id, the first of every answer; {found}"
        )
    forced = ids(main, "forced_bos_token_id")
    if generation is None and config.get("force_bos_token_to_be_generated"):  # an older form, in files of BART
        forced = ids(main, "bos_token_id")
    model = EncoderDecoder(
        encoder_layers=encoder_layers,
        start_token_id=start[0],
        forced_bos_token_id=forced[0] if forced else None,
        forced_eos_token_ids=ids(main, "forced_eos_token_id"),
        source_positions=positions,
        target_positions=positions,
        padding_token_id=None if default_padding is None else (*ids("config.json", "pad_token_id"), default_padding)[0],
    )
    if model.padding_token_id in (*model.beginning(), *model.forced_eos_token_ids, *eos_token_ids):
        raise ModelError(
            f"{folder / 'config.json'}: pad_token_id {model.padding_token_id} is also the start token, a forced token "
            "or an end token, and the model has no position for padding"
        )
    return model
