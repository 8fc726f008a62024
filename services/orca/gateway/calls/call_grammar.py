"""The grammar of a call's answers: its fields and its tools become one text, which is checked before the submit."""

from collections.abc import Sequence
from dataclasses import dataclass

from orca.core.domain.errors import InvalidRequest
from orca.gateway.calls.bodies import GenerationBody
from orca.gateway.calls.unsupported_fields import STRUCTURED, refuse_unsupported
from orca.gateway.formats.grammar import AnswerGrammar
from orca.gateway.formats.tables import begins_reasoning
from orca.gateway.formats.tools import CallTools
from orca.gateway.grammars.fields import NamedGrammar, grammar_of, parse_schema
from orca.gateway.http.receive import check_shape
from orca.gateway.models.models import ServedModel
from orca.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as the model gets it."""

    prompt: Sequence[int]  # token ids
    tools: CallTools | None


async def check_grammar(
    body: GenerationBody, model: ServedModel, settings: GatewaySettings, chat: Chat | None = None
) -> NamedGrammar | None:
    """Return the grammar of a call's answers; None if it has none.

    Args: chat: of a chat call.
    Raises: InvalidRequest, ApiError.
    """
    structured = body.structured_outputs
    if structured is not None:
        refuse_unsupported(structured.model_extra or {}, STRUCTURED, "structured_outputs.")
        if isinstance(structured.of_schema, str):
            # A schema has the bounds of the body also as a text, whose insides nobody has seen yet.
            param = "structured_outputs.json"
            schema = parse_schema(structured.of_schema, param)
            check_shape(schema, settings, f"{param}: the JSON", param)
            structured = structured.model_copy(update={"of_schema": schema})
    answer = grammar_of(body.response_format, structured)
    if answer is not None:
        await model.grammars.check(answer)
    if chat is not None and chat.tools is not None:
        if model.formats.tool is not None:
            return await _check_calls(chat.tools, answer, model, chat)
        if chat.tools.must_call:
            # Otherwise the answer is text without tool calls, which any tools allow.
            param = chat.tools.param
            message = "the format in which this model calls tools is not known, so that a call cannot be forced"
            raise InvalidRequest(f"{param}: {message}", param=param)
    if answer is not None and chat is not None and model.formats.reasoning is not None:
        answer = _answer_grammar(model, chat).of_answer(answer)
        await model.grammars.check(answer)
    return answer


async def _check_calls(
    tools: CallTools, answer: NamedGrammar | None, model: ServedModel, chat: Chat
) -> NamedGrammar | None:
    """Return the grammar of answers that may call tools; None if nothing constrains them."""
    if answer is None and not tools.constrains:
        return None
    try:
        grammar = _answer_grammar(model, chat).of_calls(tools, answer, obeys_all=True)
        await model.grammars.check(grammar)
    except InvalidRequest:
        if all(function.is_strict for function in tools.functions):
            raise
        # Without `strict` a schema is a hint: one that has no grammar does not refuse the call.
        grammar = _answer_grammar(model, chat).of_calls(tools, answer, obeys_all=False)
        await model.grammars.check(grammar)
    return grammar


def _answer_grammar(model: ServedModel, chat: Chat) -> AnswerGrammar:
    reasoning = model.formats.reasoning
    is_in_reasoning = reasoning is not None and begins_reasoning(reasoning, model.tokenizer, chat.prompt)
    return AnswerGrammar(model.formats, model.tokenizer.special_ids, is_in_reasoning)
