from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Epoch(_message.Message):
    __slots__ = ("number", "holder")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    number: int
    holder: str
    def __init__(self, number: _Optional[int] = ..., holder: _Optional[str] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("number", "call")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    number: int
    call: str
    def __init__(self, number: _Optional[int] = ..., call: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("phase", "detail", "stage", "stages", "tensor", "revision", "epoch", "last_step", "slots_possible", "slots_in_use", "weight_bytes", "loaded_permille", "process", "max_model_len", "still_ms", "cause", "contract", "local")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[StatusReply.Phase]
        LOADING: _ClassVar[StatusReply.Phase]
        IDLE: _ClassVar[StatusReply.Phase]
        JOINED: _ClassVar[StatusReply.Phase]
        FAILED: _ClassVar[StatusReply.Phase]
    PHASE_UNSPECIFIED: StatusReply.Phase
    LOADING: StatusReply.Phase
    IDLE: StatusReply.Phase
    JOINED: StatusReply.Phase
    FAILED: StatusReply.Phase
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[StatusReply.Cause]
        INSIDE: _ClassVar[StatusReply.Cause]
        OUTSIDE: _ClassVar[StatusReply.Cause]
        LINK: _ClassVar[StatusReply.Cause]
    CAUSE_UNSPECIFIED: StatusReply.Cause
    INSIDE: StatusReply.Cause
    OUTSIDE: StatusReply.Cause
    LINK: StatusReply.Cause
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_POSSIBLE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    STILL_MS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    phase: StatusReply.Phase
    detail: str
    stage: int
    stages: int
    tensor: int
    revision: str
    epoch: Epoch
    last_step: int
    slots_possible: int
    slots_in_use: int
    weight_bytes: int
    loaded_permille: int
    process: str
    max_model_len: int
    still_ms: int
    cause: StatusReply.Cause
    contract: int
    local: LocalAddress
    def __init__(self, phase: _Optional[_Union[StatusReply.Phase, str]] = ..., detail: _Optional[str] = ..., stage: _Optional[int] = ..., stages: _Optional[int] = ..., tensor: _Optional[int] = ..., revision: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., last_step: _Optional[int] = ..., slots_possible: _Optional[int] = ..., slots_in_use: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., loaded_permille: _Optional[int] = ..., process: _Optional[str] = ..., max_model_len: _Optional[int] = ..., still_ms: _Optional[int] = ..., cause: _Optional[_Union[StatusReply.Cause, str]] = ..., contract: _Optional[int] = ..., local: _Optional[_Union[LocalAddress, _Mapping]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("epoch", "rendezvous", "stages", "slots", "block_tokens", "feeds_tokens", "timeout_ms", "processes", "contract")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEEDS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    rendezvous: str
    stages: _containers.RepeatedScalarFieldContainer[str]
    slots: int
    block_tokens: int
    feeds_tokens: bool
    timeout_ms: int
    processes: _containers.RepeatedScalarFieldContainer[str]
    contract: int
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., rendezvous: _Optional[str] = ..., stages: _Optional[_Iterable[str]] = ..., slots: _Optional[int] = ..., block_tokens: _Optional[int] = ..., feeds_tokens: _Optional[bool] = ..., timeout_ms: _Optional[int] = ..., processes: _Optional[_Iterable[str]] = ..., contract: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_tokens", "bias_values", "seed", "logprobs", "prompt_logprobs", "min_tokens", "ignore_eos", "stop_token_ids", "grammar", "allowed_token_ids", "forbidden_token_ids", "forbidden_sequences")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORBIDDEN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORBIDDEN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    logprobs: int
    prompt_logprobs: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    forbidden_token_ids: _containers.RepeatedScalarFieldContainer[int]
    forbidden_sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., forbidden_token_ids: _Optional[_Iterable[int]] = ..., forbidden_sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class NewRequest(_message.Message):
    __slots__ = ("handle", "request_id", "claim", "tokens", "prompt_length", "max_total_tokens", "sampling", "decoder_prefix", "max_new_tokens", "prefix")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DECODER_PREFIX_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    claim: Claim
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    max_total_tokens: int
    sampling: SamplingParams
    decoder_prefix: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    prefix: PrefixBlocks
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., decoder_prefix: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., prefix: _Optional[_Union[PrefixBlocks, _Mapping]] = ...) -> None: ...

class PrefixBlocks(_message.Message):
    __slots__ = ("handle", "blocks")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    blocks: int
    def __init__(self, handle: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("handle", "start", "count", "sample", "token", "part")
    class Part(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PART_UNSPECIFIED: _ClassVar[Row.Part]
        SOURCE: _ClassVar[Row.Part]
        TARGET: _ClassVar[Row.Part]
    PART_UNSPECIFIED: Row.Part
    SOURCE: Row.Part
    TARGET: Row.Part
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    handle: int
    start: int
    count: int
    sample: bool
    token: int
    part: Row.Part
    def __init__(self, handle: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., sample: _Optional[bool] = ..., token: _Optional[int] = ..., part: _Optional[_Union[Row.Part, str]] = ...) -> None: ...

class StepMessage(_message.Message):
    __slots__ = ("epoch", "number", "freed", "added", "rows", "lane", "kept", "evicted")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    number: int
    freed: _containers.RepeatedScalarFieldContainer[int]
    added: _containers.RepeatedCompositeFieldContainer[NewRequest]
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    lane: int
    kept: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedCompositeFieldContainer[PrefixBlocks]
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., number: _Optional[int] = ..., freed: _Optional[_Iterable[int]] = ..., added: _Optional[_Iterable[_Union[NewRequest, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., lane: _Optional[int] = ..., kept: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[_Union[PrefixBlocks, _Mapping]]] = ...) -> None: ...

class RunReply(_message.Message):
    __slots__ = ("verdict", "epoch")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[RunReply.Verdict]
        ACCEPTED: _ClassVar[RunReply.Verdict]
        ALREADY_DONE: _ClassVar[RunReply.Verdict]
        WRONG_EPOCH: _ClassVar[RunReply.Verdict]
    VERDICT_UNSPECIFIED: RunReply.Verdict
    ACCEPTED: RunReply.Verdict
    ALREADY_DONE: RunReply.Verdict
    WRONG_EPOCH: RunReply.Verdict
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    verdict: RunReply.Verdict
    epoch: Epoch
    def __init__(self, verdict: _Optional[_Union[RunReply.Verdict, str]] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ...) -> None: ...

class ResultsRequest(_message.Message):
    __slots__ = ("epoch", "after", "only_end")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ONLY_END_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    after: int
    only_end: bool
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., after: _Optional[int] = ..., only_end: _Optional[bool] = ...) -> None: ...

class LocalAddress(_message.Message):
    __slots__ = ("name", "key")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: str
    def __init__(self, name: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class LocalHello(_message.Message):
    __slots__ = ("key", "epoch")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    key: str
    epoch: Epoch
    def __init__(self, key: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("token", "logprob", "top_tokens", "top_logprobs")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Sampled(_message.Message):
    __slots__ = ("handle", "index", "token", "logprob", "prompt_logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    index: int
    token: int
    logprob: Logprob
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    def __init__(self, handle: _Optional[int] = ..., index: _Optional[int] = ..., token: _Optional[int] = ..., logprob: _Optional[_Union[Logprob, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ...) -> None: ...

class StageTiming(_message.Message):
    __slots__ = ("stage", "received_ns", "start_ns", "end_ns")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    received_ns: int
    start_ns: int
    end_ns: int
    def __init__(self, stage: _Optional[int] = ..., received_ns: _Optional[int] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("handle", "reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: str
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ResultMessage(_message.Message):
    __slots__ = ("epoch", "number", "sampled", "timing", "refused")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    number: int
    sampled: _containers.RepeatedCompositeFieldContainer[Sampled]
    timing: StageTiming
    refused: _containers.RepeatedCompositeFieldContainer[Refused]
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., number: _Optional[int] = ..., sampled: _Optional[_Iterable[_Union[Sampled, _Mapping]]] = ..., timing: _Optional[_Union[StageTiming, _Mapping]] = ..., refused: _Optional[_Iterable[_Union[Refused, _Mapping]]] = ...) -> None: ...

class StoreEmpty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreSet(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class StoreGet(_message.Message):
    __slots__ = ("keys", "timeout_ms")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    timeout_ms: int
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class StoreValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, values: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StoreAdd(_message.Message):
    __slots__ = ("key", "amount")
    KEY_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    key: str
    amount: int
    def __init__(self, key: _Optional[str] = ..., amount: _Optional[int] = ...) -> None: ...

class StoreCount(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: int
    def __init__(self, value: _Optional[int] = ...) -> None: ...

class StoreCompareSet(_message.Message):
    __slots__ = ("key", "expected", "desired")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    key: str
    expected: bytes
    desired: bytes
    def __init__(self, key: _Optional[str] = ..., expected: _Optional[bytes] = ..., desired: _Optional[bytes] = ...) -> None: ...
