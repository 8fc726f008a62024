"""Turns a body into a submission: every check that needs no pool, the prompt, and the sampling parameters.

The code is straight-line and without I/O. Ids, time and chance come in as a `CallContext`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from orca.core.domain.errors import InvalidRequest
from orca.core.domain.request import SCHEMA, Request, SamplingParams
from orca.core.priority import weight_of
from orca.gateway.calls.bodies import ChatBody, CompletionBody, GenerationBody, TokenizeBody
from orca.gateway.calls.lengths import InputLengths, check_output_length, check_prompt_length, check_room
from orca.gateway.calls.messages import character_count, plain_messages
from orca.gateway.calls.opened_call import OpenedCall
from orca.gateway.calls.target import CallTokens, check_target_fields
from orca.gateway.calls.token_ids import check_token_ids, is_token_list
from orca.gateway.calls.unsupported_fields import CHAT, COMPLETION, refuse_unsupported
from orca.gateway.errors import shown
from orca.gateway.formats.tables import ModelFormats, TaggedCall, stored_name
from orca.gateway.formats.tools import CallTools, tools_of
from orca.gateway.models.chat_template import ChatTemplate
from orca.gateway.models.models import PromisedSlots, ServedModel
from orca.gateway.render.render import AnswerKind, RenderOptions
from orca.gateway.render.shown_text import TextFlag
from orca.gateway.responses.bodies import ResponseChat
from orca.gateway.settings import GatewaySettings
from orca.pool.records import OnDisconnect, Submission
from orca.pool.schemas import SCHEMA_OF_FORMATS, SCHEMA_OF_GOALS, SCHEMA_OF_WEIGHTS

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""

SEEDS = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """Everything besides the body that decides a submission: the opened call, and ids, time and chance."""

    call: OpenedCall
    parent: str
    reader: str
    now_ms: int  # wall clock, Unix milliseconds
    seed: int  # used if the body has none, [0, 2^63)
    digest: str  # of the body if the call may be repeated; otherwise empty
    is_kept: bool  # unless the body says otherwise, the call goes on when nobody reads it
    traceparent: str | None  # trace context for the call's requests
    schema: int = SCHEMA  # number in force in the pool, as far as the gateway knows


def completion_prompts(body: CompletionBody, model: ServedModel, settings: GatewaySettings) -> list[str | list[int]]:
    """Return the prompts of a call, as text or checked token ids. Raises: InvalidRequest, ApiError."""
    refuse_unsupported(_without_repeated_bound(body), COMPLETION)
    _check_stream(body)
    check_target_fields(body, model)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens: must be at least 1 unless echo is true", param="max_tokens")
    choices = body.n or 1
    if body.best_of is not None and body.best_of != choices:
        message = f"best_of: only n, which is {choices}, is supported, not {body.best_of}"
        raise InvalidRequest(message, param="best_of")
    prompt = body.prompt
    if isinstance(prompt, str) or is_token_list(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        message = f"prompt: must be text or token ids, or a list of either, not {shown(prompt)}"
        raise InvalidRequest(message, param="prompt")
    _check_choices(len(prompt), choices, settings)
    for i, element in enumerate(prompt):
        if not isinstance(element, str):
            if isinstance(element, list):
                # First, because checking each of a million ids takes long.
                check_prompt_length(len(element), model.info, body.max_tokens, param="prompt")
            check_token_ids(element, model.info.vocab_size, param="prompt" if len(prompt) == 1 else f"prompt[{i}]")
    return prompt


def _without_repeated_bound(body: CompletionBody) -> Mapping[str, Any]:
    """Return the further fields of a completion, without a max_completion_tokens that only repeats max_tokens.

    Older versions of GuideLLM send both.
    """
    given, name = body.model_extra or {}, "max_completion_tokens"
    repeated = given.get(name)
    if isinstance(repeated, bool) or repeated != body.max_tokens:
        return given
    return {key: value for key, value in given.items() if key != name}


async def chat_prompt(
    body: ChatBody | TokenizeBody, model: ServedModel, settings: GatewaySettings, tools: CallTools | None
) -> str:
    """Render a chat by the model's template. Args: tools: from `chat_tools`. Raises: InvalidRequest, ApiError."""
    messages = body.messages or []
    characters = character_count(messages) + (0 if tools is None else len(orjson.dumps(tools.given)))
    if len(messages) > settings.inline_messages_max or characters > settings.inline_chat_characters_max:
        return await asyncio.to_thread(_chat_prompt, body, model, settings, tools)
    return _chat_prompt(body, model, settings, tools)


def chat_tools(body: ChatBody | TokenizeBody, model: ServedModel) -> CallTools | None:
    """Return the tools that the answer of a chat may call; None if it calls none. Raises: InvalidRequest, ApiError."""
    if isinstance(body, ChatBody):
        refuse_unsupported(body.model_extra or {}, CHAT)
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    template = _template(model)
    if tools is not None and not template.takes_tools:
        message = "tools: this model's chat template has no place for tools; tool_choice none leaves them out"
        raise InvalidRequest(message, param="tools")
    return tools


def _template(model: ServedModel) -> ChatTemplate:
    if model.chat_template is None:
        raise InvalidRequest("messages: this model has no chat template; use /v1/completions", param="messages")
    return model.chat_template


def _chat_prompt(
    body: ChatBody | TokenizeBody, model: ServedModel, settings: GatewaySettings, tools: CallTools | None
) -> str:
    if isinstance(body, ChatBody):
        _check_stream(body)
        check_target_fields(body, model)
        _check_choices(1, body.n or 1, settings)
    format_of_calls = model.formats.tool
    messages = plain_messages(body.messages or [], short_ids=format_of_calls is not None and format_of_calls.short_ids)
    variables = body.chat_template_kwargs
    if body.reasoning_effort is not None:
        # Agents send it to every model, and few templates read it.
        variables = {"reasoning_effort": body.reasoning_effort, **(variables or {})}
    continues = _continues_final_message(body)
    return _template(model).prompt(
        messages,
        tools=None if tools is None else tools.given,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continues_final_message=continues,
        variables=variables,
    )


def _continues_final_message(body: ChatBody | TokenizeBody) -> bool:
    """Return whether the answer continues the last message. Raises: InvalidRequest."""
    param = "continue_final_message"
    if not body.continue_final_message:
        return False
    if body.add_generation_prompt:
        raise InvalidRequest(f"{param}: cannot be true with add_generation_prompt true", param=param)
    last = body.messages[-1] if body.messages else None
    if last is None or last.role != "assistant" or last.content is None:
        raise InvalidRequest(f"{param}: needs a last message of role assistant, with a text", param=param)
    return True


async def echo_texts(
    body: CompletionBody | ChatBody, prompts: Sequence[Sequence[int]], model: ServedModel, settings: GatewaySettings
) -> Sequence[str | None]:
    """Return the prompts that do not come back from their tokens, as RenderOptions has them.

    A tokenizer may add tokens of its own and change the text. The tokens of most texts give the text back, so a long
    prompt is rarely stored twice.

    Args:
        prompts: token ids of each prompt.
    """
    if not isinstance(body, CompletionBody) or not body.echo:
        return ()
    texts = body.prompt if isinstance(body.prompt, list) and not is_token_list(body.prompt) else [body.prompt]
    if sum(len(text) for text in texts if isinstance(text, str)) > settings.inline_characters_max:
        return await asyncio.to_thread(_echo_texts, texts, prompts, model)
    return _echo_texts(texts, prompts, model)


def _echo_texts(texts: list[Any], prompts: Sequence[Sequence[int]], model: ServedModel) -> Sequence[str | None]:
    echoed = tuple(
        text if isinstance(text, str) and text != model.tokenizer.decode(ids, skip_special_tokens=False) else None
        for text, ids in zip(texts, prompts, strict=True)
    )
    return echoed if any(text is not None for text in echoed) else ()


def submission(
    body: CompletionBody | ChatBody,
    tokens: CallTokens,
    model: ServedModel,
    settings: GatewaySettings,
    context: CallContext,
    promised: PromisedSlots | None,
    echoed: Sequence[str | None] = (),
) -> Submission:
    """Make all requests of a call: n choices of each prompt, in order.

    Args:
        promised: slots of the largest request that fits; None if that is unknown.
        echoed: result of `echo_texts`.
    Raises: InvalidRequest naming the field.
    """
    sampling = _sampling(body, model, settings) | tokens.limits.sampling()
    if tokens.grammar is not None:
        sampling["grammar"] = tokens.grammar.text
    choices = body.n or 1
    seed = context.seed if body.seed is None else body.seed
    limits = [max_new_tokens(body, len(prompt), tokens, model, settings, promised) for prompt in tokens.prompts]
    weight = _weight(body, context)
    goal_ms = _first_token_goal_ms(context)
    salt = _cache_salt(body, settings, context)
    # Shared by all choices of a prompt, which may be long.
    shared_prompts = [tuple(prompt) for prompt in tokens.prompts]
    requests = [
        Request(
            parent=context.parent,
            choice=i * choices + choice,
            revision=model.info.revision,
            prompt=prompt,
            max_new_tokens=limits[i],
            # Every prompt gets the seeds that it would get in a call of its own.
            sampling=SamplingParams(**sampling, seed=(seed + choice) % SEEDS),
            deadline_ms=context.call.goals.deadline_ms(body.deadline_ms, limits[i]),
            first_token_deadline_ms=context.call.goals.first_token_deadline_ms,
            traceparent=context.traceparent,
            decoder_prefix=tokens.target,
            weight=weight,
            first_token_goal_ms=goal_ms,
            cache_salt=salt,
        )
        for i, prompt in enumerate(shared_prompts)
        for choice in range(choices)
    ]
    least = min(limits)
    if sampling["min_tokens"] > least:
        message = f"min_tokens: {sampling['min_tokens']} is more than max_tokens, which is {least}"
        raise InvalidRequest(message, param="min_tokens")
    options = _render_options(body, tokens, model, context, echoed)
    return Submission(
        parent=context.parent,
        requests=tuple(requests),
        reader=context.reader,
        on_disconnect=_on_disconnect(body, context),
        render=options.to_json(),
        render_names=_newer_names(options),
        conversation=body.items_json if isinstance(body, ResponseChat) else None,
        owner=context.call.owner,
        digest=context.digest,
    )


def _weight(body: GenerationBody, context: CallContext) -> float | None:
    if body.priority is None and context.schema < SCHEMA_OF_WEIGHTS:
        # The bound of a key waits for the schema: a client that asks for nothing new is not refused.
        return None
    return weight_of(context.call.priority(body.priority))


def _cache_salt(body: GenerationBody, settings: GatewaySettings, context: CallContext) -> str | None:
    """Return the salt with which a call shares prefixes: with calls that have the same one."""
    if settings.prefix_sharing == "all" or not context.call.owner:
        return body.cache_salt
    return f"{context.call.owner} {body.cache_salt or ''}"


def _first_token_goal_ms(context: CallContext) -> int | None:
    """Return the goal that orders claims. Below its schema no claim goes by one, so nothing is lost without it."""
    return None if context.schema < SCHEMA_OF_GOALS else context.call.goals.first_token_goal_ms


def _newer_names(options: RenderOptions) -> tuple[str, ...]:
    """Return the fields of a call that gateways of the release before cannot write the answer of."""
    flags = TextFlag(options.text_flags or 0)
    newer = {
        "input": options.kind is AnswerKind.RESPONSE,
        "tools": options.tool_format is not None and options.kind is not AnswerKind.RESPONSE,
        "prompt_logprobs": options.prompt_logprobs is not None,
        "include_stop_str_in_output": TextFlag.KEEPS_STOP in flags,
        "skip_special_tokens": TextFlag.SHOWS_SPECIAL in flags,
    }
    return tuple(name for name, is_set in newer.items() if is_set)


def max_new_tokens(
    body: CompletionBody | ChatBody,
    prompt_length: int,
    tokens: CallTokens,
    model: ServedModel,
    settings: GatewaySettings,
    promised: PromisedSlots | None = None,
) -> int:
    """Return the most tokens to generate: the body's number, otherwise a default cut to the context and to what fits.

    Raises: InvalidRequest if they do not fit into the model's context.
    """
    if prompt_length == 0:
        raise InvalidRequest(f"{_prompt_param(body)}: the prompt has no tokens", param=_prompt_param(body))
    if isinstance(body, ChatBody):
        asked, default = body.max_completion_tokens or body.max_tokens, settings.default_max_new_tokens
        param = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    else:
        asked, default, param = body.max_tokens, COMPLETION_MAX_TOKENS, "max_tokens"
    check_prompt_length(prompt_length, model.info, asked, param=_prompt_param(body))
    lengths = InputLengths(prompt_length, len(tokens.target), tokens.prefix_tokens)
    room = check_room(lengths, model.info, asked, param=_prompt_param(body))
    if asked is None:
        if promised is not None:
            room = min(room, promised.room(lengths.prompt, lengths.beginning))
        # If the prompt leaves no room in the memory of groups, the pool refuses it.
        return max(1, min(default, room))
    check_output_length(lengths, asked, model.info, param=param)
    # A prompt is scored by the iteration that draws its first token. That token is not shown.
    return max(1, asked)


def _sampling(body: CompletionBody | ChatBody, model: ServedModel, settings: GatewaySettings) -> dict[str, Any]:
    """Return all SamplingParams but the seed. Defaults are OpenAI's, not those of a generation_config.json."""
    stop_token_ids = body.stop_token_ids or []
    if len(stop_token_ids) > settings.stop_token_ids_max:
        message = f"stop_token_ids: has {len(stop_token_ids)} token ids, more than {settings.stop_token_ids_max}"
        raise InvalidRequest(message, param="stop_token_ids")
    check_token_ids(stop_token_ids, model.info.vocab_size, param="stop_token_ids")
    logprobs, prompt_logprobs = _logprobs(body)
    top_p = _float_or(body.top_p, 1.0)
    # The most likely token has at least this share, so it is the only one that such a top_p keeps.
    is_greedy = top_p * model.info.vocab_size <= 1
    return {
        "temperature": 0.0 if is_greedy else _float_or(body.temperature, 1.0),
        # A top_k that cuts nothing may be larger than the field of the stages' messages.
        "top_k": body.top_k if 0 < (body.top_k or 0) < model.info.vocab_size else None,
        "top_p": 1.0 if is_greedy else top_p,
        "min_p": _float_or(body.min_p, 0.0),
        "repetition_penalty": _float_or(body.repetition_penalty, 1.0),
        "presence_penalty": _float_or(body.presence_penalty, 0.0),
        "frequency_penalty": _float_or(body.frequency_penalty, 0.0),
        "logit_bias": _logit_bias(body.logit_bias or {}, model, settings),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "min_tokens": body.min_tokens or 0,
        "ignore_eos": bool(body.ignore_eos),
        "stop_token_ids": tuple(stop_token_ids),
        "stop": _stop(body.stop, settings),
    }


def _on_disconnect(body: GenerationBody, context: CallContext) -> OnDisconnect:
    if body.background and body.on_disconnect == "cancel":
        raise InvalidRequest(
            "on_disconnect: a background call has no reader, so it must be kept", param="on_disconnect"
        )
    if body.on_disconnect is None:
        return OnDisconnect.KEEP if context.is_kept else OnDisconnect.CANCEL
    return OnDisconnect(body.on_disconnect)


def _render_options(
    body: CompletionBody | ChatBody,
    tokens: CallTokens,
    model: ServedModel,
    context: CallContext,
    echoed: Sequence[str | None],
) -> RenderOptions:
    stream_options = body.stream_options if body.stream else None
    continuous = bool(stream_options and stream_options.continuous_usage_stats)
    formats = model.formats if isinstance(body, ChatBody) else ModelFormats()
    tools = tokens.tools if formats.tool is not None else None
    needs_types = formats.tool is not None and isinstance(formats.tool.body, TaggedCall)
    # Gateways of the release before, which would write other bytes, run until the number is in force.
    divides_reasoning = tools is not None or isinstance(body, ResponseChat) or context.schema >= SCHEMA_OF_FORMATS
    return RenderOptions(
        kind=_kind(body),
        model=model.info.name,
        created=context.now_ms // 1000,
        choices_per_prompt=body.n or 1,
        prefix_tokens=tokens.prefix_tokens,
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        echo_texts=tuple(echoed),
        echo_only=isinstance(body, CompletionBody) and body.max_tokens == 0,
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=continuous,
        return_token_ids=bool(body.return_token_ids),
        event_ids=context.call.wants_event_ids,
        goals=context.call.goals,
        tool_format=None if tools is None else formats.stored_tool_name(is_constrained=_has_form(body)),
        reasoning_format=stored_name(tokens.reasoning) if divides_reasoning else None,
        tools=tools.schemas_json() if tools is not None and needs_types else None,
        items=body.echo_json if isinstance(body, ResponseChat) else None,
        prompt_logprobs=_prompt_logprobs(body),
        text_flags=_text_flags(body) or None,
    )


def _has_form(body: GenerationBody) -> bool:
    """Return whether an answer without tool calls has a form."""
    has_format = body.response_format is not None and body.response_format.type != "text"
    return has_format or body.structured_outputs is not None


def _kind(body: CompletionBody | ChatBody) -> AnswerKind:
    if isinstance(body, ResponseChat):
        return AnswerKind.RESPONSE
    return AnswerKind.CHAT if isinstance(body, ChatBody) else AnswerKind.COMPLETION


def _text_flags(body: GenerationBody) -> int:
    keeps_stop, shows_special = bool(body.include_stop_str_in_output), body.skip_special_tokens is False
    return int(TextFlag.KEEPS_STOP * keeps_stop | TextFlag.SHOWS_SPECIAL * shows_special)


def _logprobs(body: CompletionBody | ChatBody) -> tuple[int | None, int | None]:
    """Return the numbers of alternatives to report for output and for prompt tokens."""
    of_prompt = _prompt_logprobs(body)
    if isinstance(body, CompletionBody):
        if body.echo and body.logprobs is not None:
            of_prompt = max(of_prompt or 0, body.logprobs)
        return body.logprobs, of_prompt
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0 if body.logprobs else None), of_prompt


def _prompt_logprobs(body: GenerationBody) -> int | None:
    """Return the number that the field asks for: a stream has no place for them. Raises: InvalidRequest."""
    if body.stream and body.prompt_logprobs:
        message = "prompt_logprobs: a stream has none; leave it out, or make the call without stream"
        raise InvalidRequest(message, param="prompt_logprobs")
    return None if body.stream else body.prompt_logprobs


def _stop(stop: Any, settings: GatewaySettings) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(texts, list):
        raise InvalidRequest(f"stop: must be text or a list of texts, not {shown(stop)}", param="stop")
    if len(texts) > settings.stop_max:
        raise InvalidRequest(f"stop: has {len(texts)} texts, more than {settings.stop_max}", param="stop")
    for text in texts:
        if not isinstance(text, str):
            raise InvalidRequest(f"stop: must be text or a list of texts; it has {shown(text)}", param="stop")
        if not 1 <= len(text) <= settings.stop_characters_max:
            message = f"stop: a text must have 1 to {settings.stop_characters_max} characters, not {len(text)}"
            raise InvalidRequest(message, param="stop")
    return tuple(dict.fromkeys(texts))


def _logit_bias(bias: dict[str, float], model: ServedModel, settings: GatewaySettings) -> tuple[tuple[int, float], ...]:
    if len(bias) > settings.logit_bias_max:
        message = f"logit_bias: has {len(bias)} entries, more than {settings.logit_bias_max}"
        raise InvalidRequest(message, param="logit_bias")
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1
        if not 0 <= token_id < model.info.vocab_size:
            message = f"logit_bias: {shown(key)} is not a token id of this model (0 to {model.info.vocab_size - 1})"
            raise InvalidRequest(message, param="logit_bias")
        if not -100 <= value <= 100:
            message = f"logit_bias: the bias of {key} must be between -100 and 100, not {value:g}"
            raise InvalidRequest(message, param="logit_bias")
        pairs[token_id] = value
    return tuple(sorted(pairs.items()))


def _check_stream(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: needs stream to be true", param="stream_options")


def _check_choices(prompts: int, choices: int, settings: GatewaySettings) -> None:
    if prompts * choices > settings.choices_max:
        param = "n" if choices > 1 else "prompt"
        asked = f"{choices} choices" if prompts == 1 else f"{prompts} prompts with n = {choices}"
        raise InvalidRequest(f"{param}: {asked} are more than {settings.choices_max} choices of one call", param=param)


def _prompt_param(body: GenerationBody) -> str:
    return "messages" if isinstance(body, ChatBody) else "prompt"


def _float_or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
