"""The bytes of an answer: a pure function of the log and of the options that were stored at submit.

Nothing here reads a clock, a setting or the pool, so any gateway writes the same bytes, from any index on. A stream has
one event per token, in the order of its log:

    <choice>.<index>    token `index` of a choice; the first event also has role, echo and prompt token ids
    <choice>.end        the text that was held back, and the finish reason; or the error that ended the choice
    end                 `[DONE]`, after a chunk with usage if that was asked for; never after an error

These ids are SSE `id:` lines. They are sent only if `event_ids` is set: widely used benchmark clients take each line or
message of a stream for `data:` and fail on any other field.

A gateway that stops before a stream with ids has ended sends one more event, which has no id of its own:

    event: resume
    data: {"error": {...}, "resume": {"request_id": ..., "last_event_ids": ["0.41", "1.start"]}}

The error's code is `gateway_draining`. The ids are the last one that was sent for each choice, or `<choice>.start` if
there was none. Joined by commas they are the `Last-Event-ID` after which to resume.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from orca.core.domain.request import End, EndingTokens, FinishReason, Request, Token
from orca.core.domain.text import OutputText, Tokenizer
from orca.gateway.errors import ApiError, end_error
from orca.gateway.formats.parts import AnswerDelta
from orca.gateway.latency_goals import NO_GOALS, LatencyGoals
from orca.gateway.render.chat_parts import ChatParts, chat_parts
from orca.gateway.render.logprobs import ScoredToken, Scorer, chat_logprobs, completion_logprobs, prompt_logprobs
from orca.gateway.render.shown_text import ShownText, TextFlag


class AnswerKind(StrEnum):
    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSE = "response"  # of the Responses API (gateway/responses)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """Everything but requests and logs that decides an answer's bytes. The pool stores it with the parent as JSON."""

    kind: AnswerKind
    model: str  # the name that the client used
    created: int  # Unix seconds
    choices_per_prompt: int = 1  # OpenAI's n: choices i*n .. i*n + n - 1 answer prompt i
    prefix_tokens: int = 0  # tokens of the call's `decoder_prefix`, which count as prompt
    echo: bool = False  # completions: the prompt's text comes first
    # The text of each prompt that its tokens alone do not give back. Other prompts have None. Empty if none has a text.
    echo_texts: tuple[str | None, ...] = ()
    echo_only: bool = False  # nothing follows the prompt: one token is generated to score it and not shown
    include_usage: bool = False  # a chunk with usage before `[DONE]`
    continuous_usage: bool = False  # usage so far in each chunk
    return_token_ids: bool = False
    event_ids: bool = False
    goals: LatencyGoals = NO_GOALS  # change no byte; stored here so that other gateways have them

    # Schema 3. None where they are not set.
    tool_format: str | None = None  # name of the table by which tool calls are read
    reasoning_format: str | None = None  # the same for reasoning
    tools: str | None = None  # JSON: the schema of the parameters by the name of the tool, if the table needs types
    items: str | None = None  # JSON: fields of a call to the Responses API that its response repeats
    prompt_logprobs: int | None = None  # a whole answer has those of the prompt, with so many alternatives
    text_flags: int | None = None  # bits: TextFlag

    def to_json(self) -> str:
        stored = {field.name: getattr(self, field.name) for field in fields(self)}
        stored = {name: value for name, value in stored.items() if value is not None}
        # Gateways of the release before read it too. They do not know these fields, and take a list for true.
        if not self.goals.named:
            del stored["goals"]
        if not self.prefix_tokens:
            del stored["prefix_tokens"]
        if echo_texts := stored.pop("echo_texts"):
            stored["echo"] = echo_texts
        return orjson.dumps(stored).decode()

    @classmethod
    def from_json(cls, text: str) -> "RenderOptions":
        """Read what a gateway stored. Options of a later release are ignored."""
        known = {field.name for field in fields(cls)}
        stored = {name: value for name, value in orjson.loads(text).items() if name in known}
        echo = stored["echo"]
        stored |= {"echo": bool(echo), "echo_texts": tuple(echo) if isinstance(echo, list) else ()}
        return cls(**{**stored, "kind": AnswerKind(stored["kind"]), "goals": LatencyGoals(**stored.get("goals", {}))})

    def echo_text(self, choice: int) -> str | None:
        """Return the text of a choice's prompt; None if it is that of the prompt's tokens."""
        return self.echo_texts[choice // self.choices_per_prompt] if self.echo_texts else None


@dataclass(frozen=True, slots=True)
class RenderModel:
    """The part of a model that rendering needs."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]


class TokenDetails(NamedTuple):
    """Some of a choice's tokens, for the details of its usage. None: nobody counts them."""

    reasoning: int | None = None  # of its reasoning so far; None if it is not told from the answer
    cached: int | None = None  # of the prompt, which had not to be computed


class ChoiceStream:
    """Writes the events of one choice. To resume at index k, push tokens 0 .. k-1 and drop their events."""

    def __init__(self, request: Request, options: RenderOptions, render_model: RenderModel) -> None:
        self._request = request
        self._options = options
        self._tokenizer = render_model.tokenizer
        self._parts = _parts(request, options, render_model)
        self._log = ChoiceLog(request, options, render_model, self._parts)
        self._has_ended = False
        self._is_chat = options.kind is AnswerKind.CHAT
        # An event is: lead, text, tail. Both leads and the usual tail never change.
        head = b"data: " + _head(request.parent, options, is_chunk=True)
        opening = b',"choices":[{"index":%d,' % request.choice
        self._lead = head + opening
        self._first_lead = head + self._prompt_ids(AnswerKind.CHAT) + opening
        if self._parts is not None:
            self._lead += b'"delta":'
            self._first_lead += b'"delta":'
        else:
            self._lead += b'"delta":{"content":' if self._is_chat else b'"text":'
            self._first_lead += b'"delta":{"role":"assistant","content":' if self._is_chat else b'"text":'
        self._close_text = b"}" if self._is_chat and self._parts is None else b""
        self._usual_tail = self._tail() if self._is_usual() else None

    def opening(self) -> bytes:
        """Return the events before the first token: none."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """Return an event that says why the stream ends early."""
        return error_event(error.body())

    def token(self, token: Token) -> bytes:
        """Return the event of the log's next token."""
        index = self._log.count
        text, scored = self._log.push(token)
        if self._usual_tail is not None and index:
            event = self._lead + self._written(text) + self._usual_tail
        else:
            lead = self._lead if index else self._first_lead
            prompt_ids = b"" if index else self._prompt_ids(AnswerKind.COMPLETION)
            tail = self._tail(scored, prompt_ids=prompt_ids, token_ids=self._shown(token))
            event = lead + self._written(text, is_first=not index) + tail
        return b"id: %d.%d\n%b" % (self._request.choice, index, event) if self._options.event_ids else event

    def end(self, end: End) -> bytes:
        """Return the event after the last token: the finish reason, or the error that ended the choice."""
        self._has_ended = True
        error = end_error(end, self._request, self._options.goals)
        if error is None:
            lead = self._lead if end.count else self._first_lead
            written = self._written(self._log.flush(end), is_first=not end.count)
            event = lead + written + self._tail(end=_shown_end(end, self._options))
        else:
            event = error_event(error.body())
        return b"id: %d.end\n%b" % (self._request.choice, event) if self._options.event_ids else event

    def _written(self, text: str | AnswerDelta, *, is_first: bool = False) -> bytes:
        if isinstance(text, str):
            return orjson.dumps(text)
        assert self._parts is not None, "the log divides the text only with parts"
        return self._parts.delta(text, is_first=is_first)

    @property
    def details(self) -> TokenDetails:
        """Return the details of its usage so far."""
        return self._log.details

    @property
    def tokens_to_echo(self) -> int:
        """Tokens of the prompt that the event of the next token repeats."""
        return len(self._request.prompt) if self._options.echo and not self._log.count else 0

    @property
    def last_event_id(self) -> str:
        """The id of the event that was made last; `<choice>.start` before the first."""
        if self._has_ended:
            return f"{self._request.choice}.end"
        return f"{self._request.choice}.{self._log.count - 1 if self._log.count else 'start'}"

    def _shown(self, token: Token) -> Sequence[int]:
        return () if self._options.echo_only else (token.id,)

    def _is_usual(self) -> bool:
        options = self._options
        has_logprobs = self._request.sampling.logprobs is not None
        return not (options.return_token_ids or options.continuous_usage or has_logprobs)

    def _tail(
        self,
        scored: Sequence[ScoredToken] = (),
        *,
        prompt_ids: bytes = b"",
        token_ids: Sequence[int] = (),
        end: End | None = None,
    ) -> bytes:
        """Return the part of an event after its text."""
        logprobs = orjson.dumps(_logprobs(scored, self._options.kind, self._tokenizer))
        reason, stop = (None, None) if end is None else (_finish_reason(end, self._parts), end.stop)
        tail = self._close_text + b',"logprobs":' + logprobs + b',"finish_reason":' + orjson.dumps(reason)
        if end is not None:
            tail += b',"stop_reason":' + orjson.dumps(stop)
        if self._options.return_token_ids:
            tail += prompt_ids + b',"token_ids":' + orjson.dumps(token_ids)
        return tail + b"}]" + self._usage() + b"}\n\n"

    def _usage(self) -> bytes:
        if self._options.continuous_usage:
            prompt_tokens = len(self._request.prompt) + self._options.prefix_tokens
            usage = _usage(prompt_tokens, self._log.shown_count, self.details)
            return b',"usage":' + orjson.dumps(usage)
        return b',"usage":null' if self._options.include_usage else b""

    def _prompt_ids(self, kind: AnswerKind) -> bytes:
        """Return the prompt's token ids: a chat answer has them at its top level, a completion in the choice."""
        if not self._options.return_token_ids or self._options.kind is not kind:
            return b""
        return b',"prompt_token_ids":' + orjson.dumps(self._request.prompt)


def stream_end(
    requests: Sequence[Request],
    options: RenderOptions,
    ends: Sequence[End],
    details: Sequence[TokenDetails] = (),
) -> bytes:
    """Return the end of a stream: usage if asked for and `[DONE]`; nothing if a choice failed.

    A response has said in its own last event that it is whole.

    Args: details: of the choices.
    """
    if options.kind is AnswerKind.RESPONSE:
        return b""
    if any(end_error(end, request, options.goals) for request, end in zip(requests, ends, strict=True)):
        return b""
    done = b"id: end\ndata: [DONE]\n\n" if options.event_ids else b"data: [DONE]\n\n"
    if not options.include_usage:
        return done
    usage = orjson.dumps(_usage_of_all(requests, options, ends, details))
    head = _head(requests[0].parent, options, is_chunk=True)
    return b"data: " + head + b',"choices":[],"usage":' + usage + b"}\n\n" + done


def error_event(body: bytes) -> bytes:
    """Return an event that says why a stream fails. No `[DONE]` follows it."""
    return b"data: " + body + b"\n\n"


def resume_event(body: bytes, parent: str, last_event_ids: Sequence[str]) -> bytes:
    """Return an error event that says where to resume. Args: body: of the error; last_event_ids: one per choice."""
    resume = orjson.dumps({"request_id": parent, "last_event_ids": last_event_ids})
    return b"event: resume\ndata: " + body[:-1] + b',"resume":' + resume + b"}\n\n"


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """One choice of an answer that is not streamed."""

    body: bytes  # JSON
    details: TokenDetails
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # of a chat, which has them beside its choices


def whole_answer(
    requests: Sequence[Request], options: RenderOptions, choices: Sequence[WholeChoice], ends: Sequence[End]
) -> bytes:
    """Return the answer to a call that does not stream. Args: choices: from `whole_choice`; ends: of the choices.

    No choice may have failed (see `end_error`).
    """
    head = _head(requests[0].parent, options, is_chunk=False)
    if options.prompt_logprobs is not None and options.kind is AnswerKind.CHAT:
        # All choices have the same prompt.
        head += b',"prompt_logprobs":' + orjson.dumps(choices[0].prompt_logprobs)
    if options.return_token_ids and options.kind is AnswerKind.CHAT:
        head += b',"prompt_token_ids":' + orjson.dumps(requests[0].prompt)
    usage = orjson.dumps(_usage_of_all(requests, options, ends, [choice.details for choice in choices]))
    bodies = b",".join(choice.body for choice in choices)
    return head + b',"choices":[' + bodies + b'],"usage":' + usage + b"}"


def text_so_far(
    request: Request, options: RenderOptions, tokens: Sequence[Token], end: End | None, render_model: RenderModel
) -> str:
    """Return the text of a choice from its tokens, and from its end if it has ended: all that the model has written."""
    log = ChoiceLog(request, options, render_model)
    pieces = [log.push(token)[0] for token in tokens]
    return "".join(map(str, pieces if end is None else [*pieces, log.flush(end)]))


def whole_choice(
    request: Request, options: RenderOptions, tokens: Sequence[Token], end: End, render_model: RenderModel
) -> WholeChoice:
    """Return one choice of an answer that is not streamed."""
    parts = _parts(request, options, render_model, holds_calls=True)
    log = ChoiceLog(request, options, render_model, parts)
    pushed = [log.push(token) for token in tokens]
    pieces = [*(text for text, _ in pushed), log.flush(end)]
    scored = [entry for _, entries in pushed for entry in entries]
    end = _shown_end(end, options)
    choice: dict[str, Any] = {"index": request.choice}
    if parts is not None:
        choice["message"] = parts.message([piece for piece in pieces if isinstance(piece, AnswerDelta)])
    elif options.kind is AnswerKind.CHAT:
        choice["message"] = {"role": "assistant", "content": "".join(map(str, pieces)), "refusal": None}
    else:
        choice["text"] = "".join(map(str, pieces))
    choice["logprobs"] = _logprobs(scored, options.kind, render_model.tokenizer)
    choice["finish_reason"] = _finish_reason(end, parts)
    choice["stop_reason"] = end.stop
    of_prompt = None
    if options.prompt_logprobs is not None and tokens:
        top = options.prompt_logprobs
        of_prompt = prompt_logprobs(request.prompt, tokens[0].prompt_logprobs, top, render_model.tokenizer)
    if options.prompt_logprobs is not None and options.kind is AnswerKind.COMPLETION:
        choice["prompt_logprobs"] = of_prompt
    if options.return_token_ids:
        if options.kind is AnswerKind.COMPLETION:
            choice["prompt_token_ids"] = request.prompt
        choice["token_ids"] = [token.id for token in tokens[: end.count]]
    return WholeChoice(orjson.dumps(choice), log.details, of_prompt)


def _parts(
    request: Request, options: RenderOptions, render_model: RenderModel, *, holds_calls: bool = False
) -> ChatParts | None:
    return chat_parts(
        request,
        render_model.tokenizer,
        tool_format=options.tool_format,
        reasoning_format=options.reasoning_format,
        tools=options.tools,
        shows_special=TextFlag.SHOWS_SPECIAL in TextFlag(options.text_flags or 0),
        holds_calls=holds_calls,
    )


def _finish_reason(end: End, parts: ChatParts | None) -> str:
    has_calls = parts is not None and parts.parser.calls > 0
    return "tool_calls" if has_calls and end.reason is FinishReason.STOP else end.reason


class ChoiceLog:
    """Reads one choice's log from its start, and returns the text and log probabilities that each token adds."""

    def __init__(
        self,
        request: Request,
        options: RenderOptions,
        render_model: RenderModel,
        parts: ChatParts | None = None,
    ) -> None:
        """Args: parts: they divide the text, and the log returns deltas; without them it returns text."""
        sampling = request.sampling
        self._parts = parts
        self._request = request
        self._tokenizer = render_model.tokenizer
        self._has_echo = options.echo
        self._echo_text = options.echo_text(request.choice)
        self._is_echo_only = options.echo_only
        self._output: OutputText | ShownText = OutputText.of(render_model.tokenizer, request)
        if options.text_flags:
            markers = () if parts is None else parts.marker_ids
            self._output = ShownText(render_model.tokenizer, request, TextFlag(options.text_flags), markers)
        self._ending = EndingTokens.of(sampling, render_model.eos_ids)
        self._scorer: Scorer | None = None
        if sampling.logprobs is not None:
            shows_special = TextFlag.SHOWS_SPECIAL in TextFlag(options.text_flags or 0)
            self._scorer = Scorer(render_model.tokenizer, request, shows_special=shows_special)
        self.count = 0
        self._cached_tokens: int | None = None

    def push(self, token: Token) -> tuple[str | AnswerDelta, Sequence[ScoredToken]]:
        """Return what the next token adds. The first one comes after the echoed prompt."""
        self.count += 1
        if self.count == 1:
            self._cached_tokens = token.cached_prompt_tokens
        echo, scored = self._echo(token) if self.count == 1 and self._has_echo else ("", [])
        if self._is_echo_only:
            return echo, scored
        if self._scorer is not None:
            scored.append(self._scorer.score(token.id, token.logprob))
        is_last = self._ending.ends(token.id, self.count - 1)
        if self._parts is not None:
            text = self._text(token.id, is_last)
            return self._parts.push(token.id, text, self._output.held), scored
        return echo + self._text(token.id, is_last), scored

    def _text(self, token_id: int, is_last: bool) -> str:
        """Return the text that a token adds. Args: is_last: it ends the output by itself."""
        if isinstance(self._output, ShownText):
            return self._output.push(token_id, is_last=is_last)
        return "" if is_last else self._output.push(token_id).text

    @property
    def details(self) -> TokenDetails:
        return TokenDetails(None if self._parts is None else self._parts.reasoning_tokens, self._cached_tokens)

    @property
    def shown_count(self) -> int:
        return 0 if self._is_echo_only else self.count

    def flush(self, end: End) -> str | AnswerDelta:
        """Return text that was held back until the end; nothing of it if a stop string was found."""
        text = "" if isinstance(end.stop, str) else self._output.flush()
        if self._parts is None:
            return text
        return self._parts.parser.flush(text, is_cut=end.reason is not FinishReason.STOP)

    def _echo(self, token: Token) -> tuple[str, list[ScoredToken]]:
        prompt = self._request.prompt
        text = self._echo_text
        if text is None:
            text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        if self._scorer is None:
            return text, []
        # The log may have more alternatives, for the answer's `prompt_logprobs`.
        top = self._request.sampling.logprobs or 0
        logprobs = [replace(logprob, top=logprob.top[:top]) for logprob in token.prompt_logprobs]
        return text, self._scorer.score_prompt(prompt, logprobs, text)


def _logprobs(scored: Sequence[ScoredToken], kind: AnswerKind, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if not scored:
        return None
    return chat_logprobs(scored, tokenizer) if kind is AnswerKind.CHAT else completion_logprobs(scored, tokenizer)


def _head(parent: str, options: RenderOptions, *, is_chunk: bool) -> bytes:
    """Return the beginning of an answer's JSON object, without the closing brace."""
    name = "text_completion"
    if options.kind is AnswerKind.CHAT:
        name = "chat.completion.chunk" if is_chunk else "chat.completion"
    head = {"id": parent, "object": name, "created": options.created, "model": options.model}
    return orjson.dumps(head)[:-1]


def _usage(prompt_tokens: int, completion_tokens: int, details: TokenDetails) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if details.cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": details.cached}
    if details.reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": details.reasoning}
    return usage


def _usage_of_all(
    requests: Sequence[Request], options: RenderOptions, ends: Iterable[End], details: Sequence[TokenDetails]
) -> dict[str, Any]:
    """Count the tokens of the whole call. A prompt with several choices counts once, as its first choice found it."""
    prompts = [request.prompt for request in requests[:: options.choices_per_prompt]]
    prompt_tokens = sum(map(len, prompts)) + len(prompts) * options.prefix_tokens
    firsts = details[:: options.choices_per_prompt]
    of_all = TokenDetails(_sum(each.reasoning for each in details), _sum(each.cached for each in firsts))
    return _usage(prompt_tokens, sum(_shown_end(end, options).count for end in ends), of_all)


def _sum(counts: Iterable[int | None]) -> int | None:
    """Return the sum of the counts that are known; None if none is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _shown_end(end: End, options: RenderOptions) -> End:
    """Return the end that the client sees: an answer that is only the prompt ends by its length, whatever was drawn."""
    return End(FinishReason.LENGTH, 0) if options.echo_only else end
