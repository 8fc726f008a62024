"""The models that a gateway knows: it reads answers of all of them, and accepts calls for the one in force.

While a deployment changes its model, the pool names one revision in force, first the old one, then the new one, and
requests of both are running or were answered lately. So a gateway is given both for that time, and learns from the pool
which one new calls are for.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orca.core.domain.errors import ModelError
from orca.core.domain.model import ModelInfo, load_model_info
from orca.core.domain.text import Tokenizer
from orca.core.other_model import OtherModel
from orca.gateway.errors import UNAVAILABLE, ApiError
from orca.gateway.models.chat_template import ChatTemplate
from orca.gateway.models.encoding import Encoder
from orca.gateway.render.render import RenderModel
from orca.gateway.settings import Settings
from orca.pool.records import PoolStats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, with all that it takes to accept calls for it and to write its answers."""

    info: ModelInfo
    tokenizer: Tokenizer
    encoder: Encoder
    chat_template: ChatTemplate | None
    render_model: RenderModel
    created: int = 0  # Unix seconds: when its config.json was written, 0 where that is not known

    @classmethod
    def of(cls, info: ModelInfo, tokenizer: Tokenizer, settings: Settings) -> "ServedModel":
        """Raises: ModelError when the chat template is broken."""
        template = tokenizer.chat_template
        return cls(
            info,
            tokenizer,
            Encoder(info, tokenizer, settings),
            None if template is None else ChatTemplate(template, tokenizer.named_special_tokens),
            RenderModel(tokenizer, frozenset(info.eos_token_ids)),
            _written(info.folder / "config.json"),
        )


def _written(path: Path) -> int:
    """Unix seconds of a file's last change, 0 when there is none."""
    return int(path.stat().st_mtime) if path.is_file() else 0


def load_newest(settings: Settings) -> ServedModel:
    """The gateway's own model. Raises: ModelError when it cannot be served."""
    own = OtherModel(
        folder=settings.model,
        name=settings.name,
        dtype=settings.dtype,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
    )
    return _load(own, settings)


def load_others(settings: Settings) -> list[ServedModel]:
    """The models beside the gateway's own. One that cannot be read must not keep it from serving: it is left out."""
    found = []
    for other in map(OtherModel.from_text, settings.other_models):
        try:
            found.append(_load(other, settings))
        except (ModelError, OSError) as error:
            log.error("another model is left out, its requests cannot be read here: %s", error)
    return found


def _load(model: OtherModel, settings: Settings) -> ServedModel:
    info = load_model_info(
        model.folder,
        name=model.name,
        dtype=model.dtype,
        quantization=model.quantization,
        max_model_len=model.max_model_len,
    )
    return ServedModel.of(info, Tokenizer.from_folder(model.folder), settings)


def not_served(message: str) -> ApiError:
    return ApiError(503, message, kind=UNAVAILABLE, code="revision_not_served", retry_after_s=1)


class Models:
    """All models of a gateway, and what the pool has said of them."""

    def __init__(self, newest: ServedModel, others: Iterable[ServedModel] = ()) -> None:
        """Args: newest: in force until the pool says otherwise."""
        self.newest = newest
        self._by_revision = {each.info.revision: each for each in (*others, newest)}
        self._current = newest
        self._promised: dict[str, int] = {}  # revision -> tokens of the longest request that fits

    @property
    def current(self) -> ServedModel:
        """The one that new calls are for."""
        return self._current

    def max_total_tokens(self, served: ServedModel) -> int | None:
        """Of the longest request that fits a model, prompt and output; None where the pool has not said."""
        return self._promised.get(served.info.revision)

    @property
    def has_formed(self) -> bool:
        """Whether a group has been formed, at least once, of a model that is or was in force here."""
        return bool(self._promised)

    def of(self, revision: str) -> ServedModel | None:
        """The model of a request; None for one that this gateway was not given."""
        return self._by_revision.get(revision)

    def require(self, revision: str) -> ServedModel:
        """Return the model of a request. Another model's tokenizer would write other bytes.

        Raises: ApiError 503: another gateway may have this one.
        """
        served = self.of(revision)
        if served is None:
            raise not_served(f"the request is of revision {revision}, which this gateway does not serve")
        return served

    def note(self, stats: PoolStats) -> None:
        """Take over what the pool says is in force, and what it promises for it."""
        if stats.revision is not None and self.put_in_force(stats.revision) and stats.promised_slots is not None:
            self._promised[stats.revision] = stats.promised_slots

    def note_promise(self, served: ServedModel, slots: int) -> bool:
        """Of a refusal. Returns: whether it is another one than was known."""
        is_news = self._promised.get(served.info.revision) != slots
        self._promised[served.info.revision] = slots
        return is_news

    def put_in_force(self, revision: str) -> bool:
        """Returns: whether the model is known here. If not, all stays as it was: new calls are left to be refused."""
        found = self.of(revision)
        if found is not None:
            self._current = found
        return found is not None

    def check_name(self, name: str | None) -> None:
        """Any name of a known model means the one in force, so that no client's name fails while models change.

        Raises: ApiError 404. No name means the only model.
        """
        if name is not None and all(name != each.info.name for each in self._by_revision.values()):
            message = f"the model {name!r} does not exist; this server has {self._current.info.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
