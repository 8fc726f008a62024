"""The models that a gateway knows: it renders answers of all of them, and accepts calls for the current one.

The pool names one revision in force: the current model. While a deployment changes its model, this is first the old
one, then the new one, and requests of both are running or were answered lately. So a gateway has both models for that
time, and learns from the pool which one is current.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from orca.core.answer_formats import AUTO_FORMAT
from orca.core.domain.errors import ModelError
from orca.core.domain.model import ModelInfo, load_model_info
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, slots_needed, tokens_of_any_split
from orca.core.domain.text import Tokenizer
from orca.core.other_model import OtherModel
from orca.gateway.errors import UNAVAILABLE, ApiError
from orca.gateway.formats.response_template import read_response_template
from orca.gateway.formats.tables import ModelFormats, choose_formats
from orca.gateway.grammars.checker import GrammarChecker
from orca.gateway.models.chat_template import ChatTemplate
from orca.gateway.models.encoding import Encoder
from orca.gateway.models.generation_settings import unapplied_settings
from orca.gateway.render.render import RenderModel
from orca.gateway.settings import GatewaySettings
from orca.pool.records import PoolStats

log = logging.getLogger(__name__)

_TOKENS_SHOWN = 3
"""Tokens that the warning about tokens without a row names."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, with all that is needed to accept calls for it and to render its answers."""

    info: ModelInfo
    tokenizer: Tokenizer
    encoder: Encoder
    chat_template: ChatTemplate | None
    render_model: RenderModel
    grammars: GrammarChecker
    formats: ModelFormats
    created: int = 0  # Unix seconds: when its config.json was written; 0 if unknown

    @classmethod
    def of(
        cls,
        info: ModelInfo,
        tokenizer: Tokenizer,
        settings: GatewaySettings,
        *,
        tool_format: str = AUTO_FORMAT,
        reasoning_format: str = AUTO_FORMAT,
    ) -> "ServedModel":
        """
        Args:
            tool_format: name of a table, `auto` or `none`.
            reasoning_format: the same.
        Raises: ModelError if the chat template is broken.
        """
        template = tokenizer.chat_template
        own = read_response_template(tokenizer.response_template, tokenizer)
        formats = choose_formats(
            tokenizer.tool_template or template,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            own=own.formats,
        )
        for problem in own.problems if None in (formats.tool, formats.reasoning) else ():
            log.warning("%s: response_template is not read: %s", info.folder / "tokenizer_config.json", problem)
        return cls(
            info,
            tokenizer,
            Encoder(info, tokenizer, settings),
            None
            if template is None
            else ChatTemplate(template, tokenizer.named_special_tokens, tool_source=tokenizer.tool_template),
            RenderModel(tokenizer, frozenset(info.eos_token_ids)),
            GrammarChecker(info, tokenizer, settings),
            formats,
            _changed_at(info.folder / "config.json"),
        )


def _changed_at(path: Path) -> int:
    """Return the Unix seconds of a file's last change; 0 if there is no file."""
    return int(path.stat().st_mtime) if path.is_file() else 0


def load_newest(settings: GatewaySettings) -> ServedModel:
    """Load the gateway's own model. Raises: ModelError if it cannot be served."""
    own = OtherModel(
        folder=settings.model,
        name=settings.name,
        dtype=settings.dtype,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
    )
    return _load(own, settings)


def load_others(settings: GatewaySettings) -> list[ServedModel]:
    """Load the other models. One that cannot be read is left out: it must not keep the gateway from serving."""
    found = []
    for other in map(OtherModel.from_text, settings.other_models):
        try:
            found.append(_load(other, settings))
        except (ModelError, OSError) as error:
            log.error("one of other_models is left out, its requests cannot be read here: %s", error)
    return found


def _load(model: OtherModel, settings: GatewaySettings) -> ServedModel:
    info = load_model_info(
        model.folder,
        name=model.name,
        dtype=model.dtype,
        quantization=model.quantization,
        max_model_len=model.max_model_len,
    )
    tokenizer = Tokenizer.from_folder(model.folder)
    if unknown := tokenizer.ids_from(info.vocab_size):
        shown = ", ".join(f"{text!r} = {token_id}" for token_id, text in islice(unknown.items(), _TOKENS_SHOWN))
        log.warning(
            "the tokenizer of %s has %d token ids that the model has no row for (%s%s): prompts with them are refused. "
            "To serve them, resize the model's embedding to %d rows",
            info.name,
            len(unknown),
            shown,
            ", ..." if len(unknown) > _TOKENS_SHOWN else "",
            max(unknown) + 1,
        )
    if unapplied := unapplied_settings(info.folder, is_encoder_decoder=info.encoder_decoder is not None):
        log.info(
            "%s: these settings of the model's files are not applied, each call brings its own: %s",
            info.name,
            ", ".join(f"{name} = {value}" for name, value in unapplied.items()),
        )
    return ServedModel.of(
        info, tokenizer, settings, tool_format=model.tool_format, reasoning_format=model.reasoning_format
    )


def not_served(message: str) -> ApiError:
    return ApiError(503, message, kind=UNAVAILABLE, code="revision_not_served", retry_after_s=1)


@dataclass(frozen=True, slots=True)
class PromisedSlots:
    """The memory that the pool promises to one request."""

    slots: int
    block_tokens: int

    def room(self, prompt: int, beginning: int) -> int:
        """Return the most output tokens that fit, below 1 if none do.

        Args:
            prompt: its tokens; the source of an encoder-decoder model.
            beginning: tokens of a target before its output; 0 if the output continues the prompt.
        """
        if not beginning:
            return self.slots - prompt
        # Source and target have whole blocks of their own.
        blocks = (self.slots - slots_needed(prompt, self.block_tokens)) // self.block_tokens
        return blocks * self.block_tokens - beginning

    def longest(self, info: ModelInfo) -> int:
        """Return the tokens of the longest request that fits, prompt and output, whatever the share of each."""
        has_source = info.encoder_decoder is not None
        fits = tokens_of_any_split(self.slots, self.block_tokens) if has_source else self.slots
        return min(fits, info.max_model_len)


class Models:
    """All models of a gateway, and the pool's state of them."""

    def __init__(self, newest: ServedModel, others: Iterable[ServedModel] = ()) -> None:
        """Args: newest: the current model until the pool names another one."""
        self.newest = newest
        self._by_revision = {model.info.revision: model for model in (*others, newest)}
        self._current = newest
        self._promised: dict[str, int] = {}  # revision -> slots of the largest request that fits
        self._block_tokens: dict[str, int] = {}  # revision -> tokens of a KV block
        self.schema = 1  # number in force in the pool, as far as is known

    @property
    def current(self) -> ServedModel:
        """The model for new calls."""
        return self._current

    @property
    def has_others(self) -> bool:
        """True while this gateway knows more than one model."""
        return len(self._by_revision) > 1

    def promised(self, model: ServedModel) -> PromisedSlots | None:
        """Return the slots of the largest request that fits; None until the pool promises them."""
        slots, block_tokens = (found.get(model.info.revision) for found in (self._promised, self._block_tokens))
        return None if slots is None else PromisedSlots(slots, block_tokens or DEFAULT_BLOCK_TOKENS)

    @property
    def has_formed(self) -> bool:
        """True after a group has formed for a model that is or was current here."""
        return bool(self._promised)

    def find(self, revision: str) -> ServedModel | None:
        """Return the model of a request; None if this gateway does not have it."""
        return self._by_revision.get(revision)

    def require(self, revision: str) -> ServedModel:
        """Return the model of a request. Another model's tokenizer would write other bytes.

        Raises: ApiError 503: another gateway may have this one.
        """
        model = self.find(revision)
        if model is None:
            raise not_served(f"the request is of revision {revision}, which this gateway does not serve")
        return model

    def update(self, stats: PoolStats) -> None:
        """Take over the pool's schema number, its revision in force, and the slots that it promises for it."""
        self.schema = stats.schema
        if stats.revision is not None and self.set_current(stats.revision) and stats.promised_slots is not None:
            self._promised[stats.revision] = stats.promised_slots
            if stats.block_tokens is not None:
                self._block_tokens[stats.revision] = stats.block_tokens

    def update_promise(self, model: ServedModel, slots: int) -> bool:
        """Take over the promised slots from a refusal. Returns: whether the number is new."""
        is_new = self._promised.get(model.info.revision) != slots
        self._promised[model.info.revision] = slots
        return is_new

    def set_current(self, revision: str) -> bool:
        """Make this model the current one. If it is unknown here, nothing changes, and the pool refuses new calls.

        Returns: whether the model is known.
        """
        found = self.find(revision)
        if found is not None:
            self._current = found
        return found is not None

    def check_name(self, name: str | None) -> None:
        """Check a model's name. Every known name means the current model, so that none fails while models change.

        Raises: ApiError 404. No name means the current model too.
        """
        if name is not None and all(name != model.info.name for model in self._by_revision.values()):
            message = f"The model `{name}` does not exist. This server has `{self._current.info.name}`."
            raise ApiError(404, message, param="model", code="model_not_found")
