"""The calls of the clients: a seeded mix of all shapes of calls, at Poisson times. Pure."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from checker.clients.digit_pattern import DigitPattern
from checker.history.answers import has_grammar

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


DEADLINES = 0.04
"""Share of the calls that have a deadline, unless a run asks for another one."""

BLOCK_TOKENS = 16
"""KV slots in a block of the product: beginnings that prompts have in common end near the borders of blocks."""

ANSWER_TOKENS = 40
"""Tokens of the answer in a conversation that prompts begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """The parts that prompts for a model are made of."""

    model: str
    vocabulary: range  # token ids for prompts
    words: Sequence[str]  # parts of texts
    stops: Sequence[str]  # stop strings that occur now and then
    has_chat: bool
    # Token ids for the beginnings of targets (decoder_prefix) of an encoder-decoder model, without its start token:
    # a prefix may begin with it, but then it is not counted. Empty with other models.
    prefixes: range = range(0)
    # Fields that constrain an answer. With any, every second call has one of them.
    constraints: Sequence[Mapping[str, Any]] = ()
    # Beginnings of prompts. With any, most prompts are the first tokens of one, with or without tokens of their own.
    openings: Sequence[Sequence[int]] = ()


ENGLISH = ("It was", " a fine", " morning", ", and", " Mr. Darcy", " said", " to her", " sister", " that", " he")


def english(model: str) -> PromptSource:
    """Return the source for the built-in small model, or any other English model."""
    return PromptSource(
        model=model, vocabulary=range(3, 2000), words=ENGLISH, stops=(".", " and", " the"), has_chat=True
    )


def chain(model: str, vocab_size: int) -> PromptSource:
    """Return the source for a chain model, whose token 17 is the text `<17>`."""
    words = tuple(f"<{token}>" for token in range(vocab_size))
    return PromptSource(
        model=model, vocabulary=range(vocab_size), words=words, stops=("<12", "<77", "<404>"), has_chat=False
    )


def seq2seq_chain(model: str, vocab_size: int, start_token_id: int) -> PromptSource:
    """Return the source for an encoder-decoder chain model."""
    return replace(chain(model, vocab_size), prefixes=range(start_token_id + 1, vocab_size))


def with_shared_prefixes(
    source: PromptSource, *, seed: int, answer: Callable[[Sequence[int]], Sequence[int]] | None = None
) -> PromptSource:
    """Return the source whose prompts begin as one of four conversations do, which have their system prompt in common.

    Args:
        answer: returns what the model answers to a prompt at temperature 0. Then prompts go on with answers that other
            calls get, as the next turn of a conversation does. None: tokens are drawn instead.
    """
    chance, openings = random.Random(f"{seed} openings"), []
    system = _draw_ids(source, chance, 2 * BLOCK_TOKENS + 5)
    for _ in range(4):
        asked = [*system, *_draw_ids(source, chance, chance.randint(5, 25))]
        answered = _draw_ids(source, chance, ANSWER_TOKENS) if answer is None else answer(asked)
        openings.append((*asked, *answered))
    return replace(source, openings=openings)


def with_patterns(source: PromptSource, *, seed: int) -> PromptSource:
    """Return the source for a chain model whose answers match patterns of digits."""
    chance, patterns = random.Random(f"{seed} patterns"), []
    for _ in range(12):
        sets = [chance.sample("0123456789", chance.randint(2, 7)) for _ in range(chance.choice((2, 3, 5)))]
        digits = tuple("".join(sorted(each)) for each in sets)
        least = chance.randint(1, 20)
        patterns.append(DigitPattern(digits, least, chance.choice((least, least + 15, 400))))
    return replace(source, constraints=[{"structured_outputs": {"regex": each.regex}} for each in patterns])


def with_schemas(source: PromptSource) -> PromptSource:
    """Return the source for a language model whose answers are JSON objects."""
    text, number = {"type": "string", "maxLength": 60}, {"type": "integer", "minimum": 0, "maximum": 150}
    tags = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5}
    schemas = [
        {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        for properties in (
            {"name": text, "age": number},
            {"tags": tags, "story": text},
            {"a": {"type": "object", "properties": {"b": text}, "required": ["b"], "additionalProperties": False}},
        )
    ]
    named = [{"name": f"schema{place}", "schema": schema} for place, schema in enumerate(schemas)]
    formats = [{"response_format": {"type": "json_schema", "json_schema": each}} for each in named]
    return replace(source, constraints=[*formats, {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """A call to make, and the behaviour of its client."""

    name: str
    due_s: float  # after the start of the load
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)  # in addition to those of every call
    intent: str = "finish"
    leave_after: int | None = None  # events before a client with intent `cancel` leaves
    sends_cancel: bool = False  # it sends a cancel before it leaves; otherwise it only closes the connection
    drop_after: int | None = None  # events before the client drops the connection and resumes
    rewind: int = 0  # number of known tokens that it requests again when it resumes

    @property
    def has_grammar(self) -> bool:
        """Must the answer match a grammar?"""
        return has_grammar(self.body)


def plan_calls(
    source: PromptSource,
    *,
    seed: int,
    count: int,
    rate: float,
    max_tokens: tuple[int, int],
    drops: bool,
    deadlines: float = DEADLINES,
) -> list[PlannedCall]:
    """Return `count` calls at `rate` per second.

    Args:
        max_tokens: least and most max_tokens of a call.
        drops: some clients drop their connection on purpose and resume; for servers that can resume.
        deadlines: share of the calls that have a deadline.
    """
    chance = random.Random(f"{seed} calls")
    times = _poisson(chance, rate)
    return [_call(source, chance, f"c{number}", next(times), max_tokens, drops, deadlines) for number in range(count)]


def _poisson(chance: random.Random, rate: float) -> Iterator[float]:
    at = 0.0
    while True:
        at += chance.expovariate(rate)
        yield at


def _call(
    source: PromptSource,
    chance: random.Random,
    name: str,
    due_s: float,
    max_tokens: tuple[int, int],
    drops: bool,
    deadlines: float,
) -> PlannedCall:
    is_chat = source.has_chat and chance.random() < 0.2
    body: dict[str, Any] = {
        "model": source.model,
        "max_tokens": chance.randint(*max_tokens),
        "temperature": chance.choice((0, 0.8, 1.0)),
        "seed": chance.randrange(1 << 40),
        **({"messages": _messages(source, chance)} if is_chat else {"prompt": _prompt(source, chance)}),
    }
    if source.prefixes and chance.random() < 0.4:
        body["decoder_prefix"] = _prefix(source, chance)
    if source.constraints and chance.random() < 0.5:
        body |= chance.choice(source.constraints)
    if chance.random() < 0.8:
        body["return_token_ids"] = True
    if chance.random() < 0.3:
        body["n"] = chance.choice((2, 3))
    if chance.random() < 0.2:
        body["stop"] = chance.sample(list(source.stops), k=chance.choice((1, 2)))
    if chance.random() < 0.85:
        body["stream"] = True
        if chance.random() < 0.5:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": chance.random() < 0.3}
    return _with_intent(chance, name, due_s, CHAT if is_chat else COMPLETIONS, body, drops, deadlines)


def _with_intent(
    chance: random.Random,
    name: str,
    due_s: float,
    path: str,
    body: dict[str, Any],
    drops: bool,
    deadlines: float,
) -> PlannedCall:
    draw = chance.random()
    if draw < deadlines:
        body["deadline_ms"] = chance.randint(200, 3_000)
        return PlannedCall(name=name, due_s=due_s, path=path, body=body, intent="deadline")
    if draw < deadlines + 0.04 and body.get("stream"):
        leave_after = chance.randint(1, 5)
        return PlannedCall(
            name=name,
            due_s=due_s,
            path=path,
            body=body,
            intent="cancel",
            leave_after=leave_after,
            sends_cancel=chance.random() < 0.5,
        )
    drop_after = chance.randint(1, 20) if drops and body.get("stream") and chance.random() < 0.2 else None
    rewind = chance.choice((0, 0, 1, 3))
    return PlannedCall(name=name, due_s=due_s, path=path, body=body, drop_after=drop_after, rewind=rewind)


def _prompt(source: PromptSource, chance: random.Random) -> Any:
    if source.openings and chance.random() < 0.8:
        return _shared_prompt(source, chance)
    draw = chance.random()
    if draw < 0.6:
        return _ids(source, chance)
    if draw < 0.7:
        return [_ids(source, chance), _ids(source, chance)]
    return "".join(chance.choices(source.words, k=chance.randint(2, 20)))


def _shared_prompt(source: PromptSource, chance: random.Random) -> list[int]:
    """Return the beginning of a conversation up to near a border of blocks, and perhaps tokens of its own."""
    opening = chance.choice(source.openings)
    border = chance.randrange(BLOCK_TOKENS, len(opening) + 1, BLOCK_TOKENS)
    own = chance.choice((0, 0, 1, chance.randint(2, 40)))
    return [*opening[: border + chance.choice((-1, 0, 1))], *_draw_ids(source, chance, own)]


def _ids(source: PromptSource, chance: random.Random) -> list[int]:
    return _draw_ids(source, chance, chance.randint(1, 60))


def _draw_ids(source: PromptSource, chance: random.Random, count: int) -> list[int]:
    return [chance.choice(source.vocabulary) for _ in range(count)]


def _prefix(source: PromptSource, chance: random.Random) -> Any:
    """Return the beginning of a target: ids, or a text if each of the model's tokens is one of its words."""
    ids = [chance.choice(source.prefixes) for _ in range(chance.randint(1, 12))]
    return ids if chance.random() < 0.7 else "".join(source.words[token] for token in ids)


def _messages(source: PromptSource, chance: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": "".join(chance.choices(source.words, k=chance.randint(2, 10)))}]
