"""The JSON bodies of the API: names, types and ranges of fields, as the OpenAPI document shows them.

null means the default everywhere. A whole number may be written as 5.0, as JSON Schema allows, except in a prompt,
where the kind of an item says what the prompt is. Unknown fields are ignored; those in `unsupported_fields.py` are
refused. `accept.py` checks what depends on several fields or on the model (prompt length, token ids).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator

from orca.core.priority import LEAST_URGENT_PRIORITY, MOST_URGENT_PRIORITY
from orca.gateway.formats.tools import ToolChoice, Tools
from orca.gateway.grammars.fields import ResponseFormat, StructuredOutputs


def whole_number(value: Any) -> Any:
    """Return a float without a fraction as an int; all else unchanged. JSON itself has one kind of number."""
    # Beyond 64 bits the parser has rounded the number.
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**63 else value


def whole_numbers(value: Any) -> Any:
    """Do the same to the items of a list, which may have a million."""
    return list(map(whole_number, value)) if isinstance(value, list) and float in set(map(type, value)) else value


# `accept.py` checks unions: pydantic would try a list of a hundred thousand token ids as four types.
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ],
            "description": "Text or token ids, or a list of either; at least one token each.",
        }
    ),
]
# Empty text and an empty list mean that it is absent, so that they are one call with it (idempotency.py).
DecoderPrefix = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "null"},
            ],
            "description": "Text or token ids with which the output of an encoder-decoder model begins, such as NLLB's"
            " `fra_Latn`. It counts as prompt and is not part of the answer's text. Text gets no special tokens beyond"
            " those that it has. It takes the place of the model's forced first token.",
        }
    ),
]
Priority = Annotated[
    int | None,
    Field(
        ge=MOST_URGENT_PRIORITY,
        le=LEAST_URGENT_PRIORITY,
        description="A lower number is more urgent; 0 by default, or the bound of the API key if that is above 0. It"
        " has no effect under `--order arrival`, the default.",
    ),
]
DeadlineMs = Annotated[
    int | None,
    Field(
        ge=1,
        le=2**31,
        description="Each request of the call ends this many milliseconds after it was accepted, finished or not; by"
        " default there is no deadline. Under any order of claims but `arrival` it also decides when a request starts.",
    ),
]
CacheSalt = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=256,
        description="The call shares computed prompts only with calls that have this text, of 1 to 256 characters, too."
        " Who does not know it cannot learn what others have sent.",
    ),
]
Stop = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}],
            "description": "Up to 16 strings that end the output and are not part of it. The text of a special token"
            " stands for the token, too.",
        }
    ),
]
Content = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
                {"type": "null"},
            ],
            "description": "Text, or parts of type text.",
        }
    ),
]


class Body(BaseModel):
    """A strict body: a number is not a string, a boolean is not a number. Other fields stay in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = Field(None, description="Name of the served model; by default the only one.")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(None, description="Send a last chunk with usage and without choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in each chunk.")


class GenerationBody(Body):
    """Fields that completions and chat completions have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, description="Choices per prompt; 1 by default.")
    temperature: float | None = Field(None, ge=0, le=2, description="1 by default; 0 is greedy.")
    top_p: float | None = Field(
        None, ge=0, le=1, description="Share of the most likely tokens to keep; 1 by default; 0 keeps only the first."
    )
    top_k: int | None = Field(None, ge=-1, description="Number of most likely tokens to keep; 0 and -1 keep all.")
    min_p: float | None = Field(None, ge=0, le=1)
    # Logits are divided by it, in float32: near 0 they overflow.
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, description="1 by default.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, description="Token id -> -100 to 100, added to its logit.")
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="The same seed gives the same tokens; random by default."
    )
    stop: Stop = None
    stop_token_ids: list[int] | None = Field(None, description="Token ids that end the output.")
    min_tokens: int | None = Field(None, ge=0, description="The output does not end by itself before this many tokens.")
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = Field(
        None, description="The kind of text of every answer; text by default."
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="What every answer matches; vLLM's field.")
    allowed_token_ids: list[int] | None = Field(None, description="No other token is drawn.")
    bad_words: list[str] | None = Field(
        None,
        description="Texts that the output does not have, with or without a space before. A text of one token is never"
        " drawn. For a text of several, the last token is not drawn where the output ends with the others.",
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="The text ends with the stop string, or with the text of the token that ended the output."
    )
    skip_special_tokens: bool | None = Field(None, description="True by default; with false they have their text.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="Number of alternatives to report for each token of the prompt, besides the token itself. Whole"
        " answers have them; more than 0 is refused with stream.",
    )
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens; by default true for completions, false for chat."
    )
    decoder_prefix: DecoderPrefix = None
    on_disconnect: Literal["cancel", "keep"] | None = Field(
        None,
        description="What happens to the request when nobody reads it for a while; by default cancel, and keep with "
        "background or an Idempotency-Key.",
    )
    background: bool | None = Field(
        None, description="Answer 202 with the id at once, as with the header `Prefer: respond-async`."
    )
    deadline_ms: DeadlineMs = None
    priority: Priority = None
    cache_salt: CacheSalt = None

    _whole_number = field_validator(
        "n", "top_k", "seed", "min_tokens", "prompt_logprobs", "deadline_ms", "priority", mode="before"
    )(whole_number)
    _whole_numbers = field_validator("stop_token_ids", "allowed_token_ids", "decoder_prefix", mode="before")(
        whole_numbers
    )

    @field_validator("decoder_prefix", mode="before")
    @classmethod
    def _absent_if_empty(cls, value: Any) -> Any:
        return None if value in ("", []) else value

    @field_validator("bad_words", mode="before")
    @classmethod
    def _absent_without_words(cls, value: Any) -> Any:
        return None if value == [] else value


class CompletionBody(GenerationBody):
    prompt: Prompt = Field(description="Text to continue; the source of an encoder-decoder model.")
    max_tokens: int | None = Field(
        None, ge=0, description="Most tokens to generate; 16 by default; 0 needs echo and scores the prompt."
    )
    echo: bool | None = Field(None, description="Repeat the prompt, as it was given, before the output.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Number of alternatives to report for each token.")
    best_of: int | None = Field(None, description="1 or n: the answer has every choice that is generated.")

    _whole_completion_number = field_validator("max_tokens", "logprobs", "best_of", mode="before")(whole_number)


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="The model's chat template decides which of these it supports: a message that it leaves out of the "
        "prompt is refused. A developer is the system unless the template names developers."
    )
    content: Content = None


class ToolFields(BaseModel):
    """Fields of a chat that its template gets."""

    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = Field(
        None, description="True by default; with false an answer has at most one call."
    )
    reasoning_effort: str | None = Field(
        None, description="A variable for the model's chat template; without effect if the template has none."
    )
    continue_final_message: bool | None = Field(
        None,
        description="Leave the last message, which is the assistant's, open: the answer continues its text."
        " add_generation_prompt is then false.",
    )


class ChatBody(ToolFields, GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(
        None, ge=1, description="An older name of max_completion_tokens, which overrides it."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Most tokens to generate; by default a setting (512), cut to the context."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = Field(
        None, description="True by default, and false with continue_final_message."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")

    _whole_chat_number = field_validator("max_tokens", "max_completion_tokens", "top_logprobs", mode="before")(
        whole_number
    )


class TokenizeBody(ToolFields, Body):
    """Either `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="By default true for a prompt, false for messages.")
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: list[int]

    _whole_numbers = field_validator("tokens", mode="before")(whole_numbers)


class ErrorDetail(BaseModel):
    model_config = ConfigDict(extra="forbid")

    message: str = Field(min_length=1, description="For people.")
    type: str = Field(min_length=1)
    param: str | None = Field(min_length=1, description="The field or header at fault, if there is one.")
    code: str = Field(min_length=1, description="For programs.")


class ErrorBody(BaseModel):
    """The shape of every error."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail
