"""The grammar of a call's answers: its fields and its tools become one text, which is checked before the submit."""

from collections.abc import Sequence
from dataclasses import dataclass

from orca.core.domain.errors import InvalidRequest
from orca.gateway.calls.bodies import ChatBody, GenerationBody
from orca.gateway.calls.messages import content_text
from orca.gateway.calls.unsupported_fields import STRUCTURED, refuse_unsupported
from orca.gateway.formats.grammar import AnswerGrammar
from orca.gateway.formats.tables import ModelFormats, ReasoningFormat, begins_reasoning
from orca.gateway.formats.tools import CallTools
from orca.gateway.grammars.checker import GrammarTime
from orca.gateway.grammars.fields import NamedGrammar, StructuredOutputs, grammar_of, parse_schema
from orca.gateway.http.receive import check_shape
from orca.gateway.models.models import ServedModel
from orca.gateway.settings import GatewaySettings

_KEPT_FOR_LOOSE = 0.25
"""Part of the time for the grammar whose calls have any arguments. It takes some milliseconds."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as the model gets it."""

    prompt: Sequence[int]  # token ids
    tools: CallTools | None
    reasoning: ReasoningFormat | None  # as its answer is read


def call_reasoning(body: ChatBody, model: ServedModel, text: str, prompt: Sequence[int]) -> ReasoningFormat | None:
    """Return the table by which the reasoning of a chat's answer is read; None if it is not told from the answer.

    Args:
        text: of the prompt, as the template has written it.
        prompt: its token ids.
    """
    table = model.formats.reasoning
    if table is None:
        return None
    structured = body.structured_outputs
    is_open = (
        bool(body.continue_final_message)
        and _is_inside(table, text)
        and _is_inside(table, content_text(body.messages[-1]))
        and not begins_reasoning(table, model.tokenizer, prompt)
    )
    return table.of_call(is_exact=structured is not None and structured.may_have_space_around, is_open=is_open)


def _is_inside(table: ReasoningFormat, text: str) -> bool:
    """Return whether a text ends in the middle of reasoning."""
    return text.rfind(table.begin) > text.rfind(table.end)


async def check_grammar(
    body: GenerationBody, model: ServedModel, settings: GatewaySettings, chat: Chat | None = None
) -> NamedGrammar | None:
    """Return the grammar of a call's answers; None if it has none. All checks share the time of one grammar.

    Args: chat: of a chat call.
    Raises: InvalidRequest, ApiError.
    """
    structured = body.structured_outputs
    if structured is not None:
        _check_names(structured)
        if isinstance(structured.of_schema, str):
            # A schema has the bounds of the body also as a text, whose insides nobody has seen yet.
            param = "structured_outputs.json"
            schema = parse_schema(structured.of_schema, param)
            check_shape(schema, settings, f"{param}: the JSON", param)
            structured = structured.model_copy(update={"of_schema": schema})
    answer, time = grammar_of(body.response_format, structured), model.grammars.time_of_call()
    if answer is not None:
        await model.grammars.check(answer, time)
    if chat is not None and chat.tools is not None:
        if model.formats.tool is not None:
            return await _check_calls(chat.tools, answer, model, chat, time)
        if chat.tools.must_call:
            # Otherwise the answer is text without tool calls, which any tools allow.
            param = chat.tools.param
            message = "the format in which this model calls tools is not known, so that a call cannot be forced"
            raise InvalidRequest(f"{param}: {message}", param=param)
    if answer is not None and chat is not None and chat.reasoning is not None:
        answer = _answer_grammar(model, chat).of_answer(answer)
        await model.grammars.check(answer, time)
    return answer


def _check_names(structured: StructuredOutputs) -> None:
    """Raises: ApiError, InvalidRequest for a field that is not known: it would leave the answer free."""
    given = structured.model_extra or {}
    refuse_unsupported(given, STRUCTURED, "structured_outputs.")
    for name in given.keys() - STRUCTURED.keys():
        param = f"structured_outputs.{name}"
        raise InvalidRequest(f"{param}: is not known; there are json, json_object, regex, choice, grammar", param=param)


async def _check_calls(
    tools: CallTools, answer: NamedGrammar | None, model: ServedModel, chat: Chat, time: GrammarTime
) -> NamedGrammar | None:
    """Return the grammar of answers that may call tools; None if nothing constrains them.

    Without `strict` a schema is a hint: one that has no grammar does not refuse the call. The grammar without any hints
    keeps a part of the time for itself.
    """
    if answer is None and not tools.constrains:
        return None
    loose = {function.name for function in tools.functions if not function.is_strict}
    tried = _without_rules(tools, model, chat)
    kept_s = _KEPT_FOR_LOOSE * time.build_s if loose != tried else 0.0
    time.build_s -= kept_s
    grammar = _answer_grammar(model, chat).of_calls(tools, answer, loosened=tried)
    refusal = await model.grammars.refusal(grammar, time)
    if refusal is not None and not refusal.is_slow:
        found = await _without_grammar(tools, tried, model, chat, time)
        if found != tried:
            grammar = _answer_grammar(model, chat).of_calls(tools, answer, loosened=found)
            refusal, tried = await model.grammars.refusal(grammar, time), found
    if refusal is not None and loose != tried:
        # Together they are too much.
        time.build_s += kept_s
        grammar = _answer_grammar(model, chat).of_calls(tools, answer, loosened=loose)
        refusal = await model.grammars.refusal(grammar, time)
    if refusal is not None:
        raise refusal.error(tools.functions[0].param if len(tools.functions) == 1 else "tools")
    return grammar


def _without_rules(tools: CallTools, model: ServedModel, chat: Chat) -> set[str]:
    """Return the names of functions whose schemas cannot be written as a grammar. Raises: InvalidRequest if strict."""
    names = set[str]()
    for function in tools.functions:
        try:
            _answer_grammar(model, chat).of_function(function)
        except InvalidRequest:
            if function.is_strict:
                raise
            names.add(function.name)
    return names


async def _without_grammar(
    tools: CallTools, known: set[str], model: ServedModel, chat: Chat, time: GrammarTime
) -> set[str]:
    """Return the names of functions whose own grammars are refused, and the known ones.

    What the search has not found in time is not among the names.
    Raises: InvalidRequest if such a function is strict; ApiError.
    """
    names = set(known)
    for function in tools.functions:
        if function.name in names:
            continue
        refusal = await model.grammars.refusal(_answer_grammar(model, chat).of_function(function), time)
        if refusal is None:
            continue
        if refusal.is_slow:
            break
        if function.is_strict:
            raise refusal.error(function.param)
        names.add(function.name)
    return names


def _answer_grammar(model: ServedModel, chat: Chat) -> AnswerGrammar:
    reasoning = chat.reasoning
    is_in_reasoning = reasoning is not None and begins_reasoning(reasoning, model.tokenizer, chat.prompt)
    return AnswerGrammar(ModelFormats(model.formats.tool, reasoning), model.tokenizer, is_in_reasoning)
