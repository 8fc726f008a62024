"""Schemas of the API's JSON answers, for the OpenAPI document only.

render.py, request_state.py and about.py write the answers.

Answers have no other fields than these: tests compare real answers with the document. A field without information is
null. A field is missing only if it has a default here.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from orca.gateway.calls.bodies import ErrorDetail

FinishReason = Literal["stop", "length", "cancelled", "deadline_exceeded", "model_replaced", "refused", "error"]


class AnswerSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class UsageDetails(AnswerSchema):
    reasoning_tokens: int


class PromptTokensDetails(AnswerSchema):
    cached_tokens: int = Field(
        description="Tokens of the prompt whose keys and values were there already. With several choices, of the first."
    )


class Usage(AnswerSchema):
    prompt_tokens: int = Field(
        description="Tokens of the prompt, with those that the tokenizer adds; and of decoder_prefix, without the start"
        " token and a forced first token."
    )
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = Field(
        None, description="Of a group with a prefix cache, once schema 3 is in force in the pool."
    )
    completion_tokens_details: UsageDetails | None = Field(
        None, description="Of a model whose reasoning_format is known."
    )


class CompletionLogprobs(AnswerSchema):
    """Lists of equal length with an entry for each token."""

    text_offset: list[int] = Field(description="Characters before the token.")
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(AnswerSchema):
    logprob: float
    rank: int | None = Field(
        description="1 is the most likely token; null for a token of the prompt that is not among the alternatives."
    )
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None
"""An object by token id for each token of the prompt; null for the first."""


class Choice(AnswerSchema):
    """Fields of a choice in both APIs."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = Field(description="The stop string or token id that ended it.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class Generation(AnswerSchema):
    """Fields of a whole answer in both APIs."""

    id: str
    created: int = Field(description="Unix seconds.")
    model: str
    usage: Usage


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs = Field(None, description="With prompt_logprobs.")
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class Completion(Generation):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(AnswerSchema):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerSchema):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(AnswerSchema):
    name: str
    arguments: str = Field(description="JSON, exactly as the model wrote it.")


class ToolCall(AnswerSchema):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswer(AnswerSchema):
    role: Literal["assistant"]
    content: str | None = Field(description="Null if the answer has nothing but calls or reasoning.")
    refusal: None
    tool_calls: list[ToolCall] | None = Field(None, description="Calls of the call's tools, if there are any.")
    reasoning_content: str | None = Field(
        None, description="Reasoning before the answer, of a model whose reasoning_format is known."
    )
    reasoning: str | None = Field(None, description="The same text as reasoning_content.")


class ChatChoice(Choice):
    message: ChatAnswer
    logprobs: ChatLogprobs | None


class ChatCompletion(Generation):
    object: Literal["chat.completion"]
    prompt_logprobs: PromptLogprobs = Field(None, description="With prompt_logprobs.")
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    choices: list[ChatChoice]


class ResponseObject(BaseModel):
    """A response in OpenAI's shape. The fields of the call come back in it."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix seconds.")
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    output: list[dict[str, Any]] = Field(description="Items: `reasoning`, `message`, `function_call`.")
    usage: dict[str, Any] | None = Field(description="Null until the end.")


class ItemList(AnswerSchema):
    object: Literal["list"]
    data: list[dict[str, Any]] = Field(
        description="Items: `message`, `function_call`, `function_call_output`, `reasoning`."
    )
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(AnswerSchema):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class RequestTurn(AnswerSchema):
    """The turn of a request that waits, estimated from the latest counts of the pool."""

    order: Literal["arrival", "deadline", "edf", "sjf"] | None = Field(
        description="Order of claims in force; null while no group claims."
    )
    reason: Literal["no_group", "by_arrival", "in_window", "window_over", "no_deadline", "patience_passed"] = Field(
        description="`no_group`: no group serves. `by_arrival`: those that came before it go first. `in_window`: it can"
        " still be in time, and utility and deadlines decide. `window_over`: it cannot, so all that can go first."
        " `no_deadline`: it has none, and utility decides until its patience has passed. `patience_passed`: it goes"
        " first."
    )
    ahead: int = Field(description="Estimate of the requests that are claimed before it.")


class ChoiceState(AnswerSchema):
    index: int
    status: Literal["queued", "running", "ended"]
    tokens: int = Field(description="Tokens generated so far.")
    text: str | None = Field(
        description="Text so far; null in the answer to a DELETE from a gateway of another revision."
    )
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: ErrorDetail | None = Field(description="The error of its answer; null before its end, and if it has none.")
    ttft_ms: float | None = Field(description="Milliseconds until the first token; null before it.")
    tpot_ms: float | None = Field(description="Mean milliseconds for each token after the first.")
    slo: dict[Literal["ttft", "tpot"], Literal["met", "missed"] | None] = Field(
        description="The outcome for each goal of the call; null while it is undecided."
    )
    first_claimed_unix_ms: int | None = Field(description="Its first claim by a group; null before.")
    start_window_ends_unix_ms: int | None = Field(
        description="The time by which it must start to meet its deadline; without one, the end of its patience. Once"
        " it was claimed, it is as the first claim saw it, also while it waits again. Null where claims go by arrival."
    )
    deadline_outcome: Literal["in_time", "dropped", "started_late", "ran_slow"] | None = Field(
        description="Null without a deadline, before the end, and for ends that say nothing about deadlines."
    )
    waiting: RequestTurn | None = Field(
        description="Why it waits; null if it does not, in the answer that accepts a call, and while it is not known."
    )


class Slo(AnswerSchema):
    """The latency goals of a call, from its headers; null for a goal that it does not have."""

    ttft_ms: float | None = Field(description="`x-slo-ttft-ms`.")
    tpot_ms: float | None = Field(description="`x-slo-tpot-ms`.")
    enforced: bool = Field(description="True if goals are deadlines (`--slo-enforce`).")


class Urls(AnswerSchema):
    """The paths of a call."""

    state: str = Field(description="The state again.")
    events: str = Field(description="The stream. A response has its own, at `/v1/responses/{response_id}?stream=true`.")
    result: str = Field(description="The whole answer once the call has ended.")


class RequestDocument(AnswerSchema):
    """The state of a call."""

    id: str
    object: Literal["request"]
    model: str
    status: Literal["queued", "running", "ended"] = Field(
        description="Of all its choices; `running` while they differ."
    )
    created: int = Field(description="Unix seconds.")
    deadline_unix_ms: int | None = Field(
        description="Unix milliseconds at which it ends: by `deadline_ms`, or by both enforced goals if they end it"
        " sooner. That of the first choice, null without one. A deadline for the first token is not in it."
    )
    priority: int | None = Field(None, description="Of the call, or from the bound of its API key, if it is not 0.")
    on_disconnect: Literal["cancel", "keep"] = Field(description="What happens when nobody reads it for a while.")
    slo: Slo
    choices: list[ChoiceState] = Field(description="Each of the `n` choices of each prompt.")
    urls: Urls


class ModelCard(AnswerSchema):
    id: str
    object: Literal["model"]
    created: int = Field(description="Unix seconds: when its config.json was written; 0 if unknown.")
    owned_by: str
    root: str
    parent: None
    max_model_len: int = Field(
        description="Tokens of prompt and output together; of source and target of an encoder-decoder model."
    )
    is_encoder_decoder: bool = Field(
        description="The prompt is a source, and the output is a target that does not continue it."
    )
    max_source_len: int | None = Field(description="Tokens of an encoder-decoder model's source; null: no bound.")
    max_target_len: int | None = Field(
        description="Tokens of an encoder-decoder model's target, its beginning included; null: no bound."
    )
    tool_format: str | None = Field(description="Table by which tool calls are read; null: calls stay text.")
    reasoning_format: str | None = Field(
        description="Table by which reasoning is divided from the answer; null: it stays text."
    )
    revision: str


class ModelList(AnswerSchema):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(AnswerSchema):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(None, description="With return_token_strs.")


class Text(AnswerSchema):
    prompt: str


class Health(AnswerSchema):
    status: Literal["ok"]


class Ready(BaseModel):
    """The readiness of the gateway, and the state of pool and groups. More fields may be added."""

    ready: bool
    draining: bool
    model: str
    revision: str
    pool: Literal["ok", "away"]
    groups: list[str] = Field(description="Groups whose scheduler lives.")
    groups_formed: list[str] = Field(description="Groups that serve now.")
    max_total_tokens: int | None = Field(description="The longest request that fits; null until a group has formed.")
    is_encoder_decoder: bool
    has_chat_template: bool
    waiting: int | None
    running: int | None
