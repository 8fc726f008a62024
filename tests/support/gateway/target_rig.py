"""A gateway that serves an encoder-decoder model, with the scheduler of its group."""

import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from orca.core.domain.encoder_decoder import EncoderDecoder
from orca.core.domain.model import ModelInfo
from orca.core.domain.request import Request
from orca.core.domain.text import Tokenizer
from orca.gateway.models.models import ServedModel
from orca.gateway.settings import GatewaySettings
from support.core.target_tokenizers import KINDS, wrap
from support.gateway.gateway_rig import MODEL, TEMPLATE, FakeScheduler, Rig, rig

BLOCK_TOKENS = 16
START, EOS = {"t5": 0, "bart": 2, "nllb": 2}, {"t5": 1, "bart": 2, "nllb": 2}


@functools.cache
def tokenizer(kind: str, template: str | None = None) -> Tokenizer:
    return wrap(KINDS[kind](), template=template)


def source_of(kind: str, text: str) -> tuple[int, ...]:
    """Return the tokens of a source."""
    return tuple(tokenizer(kind).encode(text))


def ids_of(kind: str, text: str) -> tuple[int, ...]:
    """Return the tokens of a text without special tokens around it."""
    return tuple(tokenizer(kind).encode(text, add_special_tokens=False))


def model_of(kind: str, *, revision: str = "r1", max_model_len: int = 100, **options: Any) -> ModelInfo:
    """Return a model. Args: options: fields of EncoderDecoder."""
    return replace(
        MODEL,
        revision=revision,
        architecture=kind,
        vocab_size=tokenizer(kind).vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(EOS[kind],),
        encoder_decoder=EncoderDecoder(encoder_layers=1, start_token_id=START[kind], **options),
    )


def served(model: ModelInfo, template: str | None = None) -> ServedModel:
    return ServedModel.of(model, tokenizer(model.architecture, template), GatewaySettings(model="tiny"))


@contextlib.asynccontextmanager
async def target_rig(
    kind: str = "t5",
    *,
    answer: str = "the lazy dog",
    template: str | None = None,
    has_template: bool = False,
    rig_options: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Rig, list[Request]]]:
    """A gateway and the requests that its scheduler gets. Each is answered by the text and EOS.

    Args: options: of `model_of`.
    """
    model, found = model_of(kind, **options), list[Request]()

    def write(request: Request) -> Sequence[int]:
        found.append(request)
        return (*ids_of(kind, answer), EOS[kind])

    def scheduler(pool: Any) -> FakeScheduler:
        return FakeScheduler(
            pool, answer=write, tokenizer=tokenizer(kind), eos_ids=(EOS[kind],), block_tokens=BLOCK_TOKENS
        )

    newest = served(model, template or (TEMPLATE if has_template else None))
    async with rig(model=model, newest=newest, make_scheduler=scheduler, **(rig_options or {})) as one:
        yield one, found
