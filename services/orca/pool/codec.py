"""Requests, tokens and ends as bytes in Redis, and the memory that they use.

body:  u32 length of the header | header, JSON | prompt, u32 per token           (little-endian)
       The header is a list. Its last two entries are left out where they say nothing: the deadline of the first token,
       and the named fields of schema 3 (schemas.py). A reader ignores a name that it does not know.
token: the id in decimal, which Redis packs into one to four bytes; or, where log probabilities were asked for,
       "L" | u32 id | u32 n | n x logprob, the token's own first (present = 1 byte before it), then the prompt's.
       A token with a number of cached prompt tokens: "C" | u32 number | the token as above
logprob: u32 token | f64 logprob | u32 n | n x (u32 token, f64 logprob)
end:   reason, count, and stop: JSON if there is one, otherwise empty. Releases before this one know no `refused`. So it
       is stored as an error whose stop is the detail, and they show it as a request that failed.

entry of a log: stream fields `token`, or `end`, `count` and `stop`; from schema 2 on also `claim`, the number of the
claim that wrote it

Scripts treat body and token as opaque; equal values have equal bytes, which is what commit compares.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import orjson

from orca.core.domain.request import End, FinishReason, Logprob, Request, SamplingParams, Token
from orca.pool.schemas import SCHEMA_3_FIELDS, named_fields

# Bytes of Redis memory, measured on 6.2 and 7.0 (`python -m pytest tests/redis/pool -k weigh`) and rounded up.
# Admission reserves them, so they are upper bounds. A waiting request really uses about two thirds of REQUEST_BYTES.
PARENT_BYTES = 800
REQUEST_BYTES = 1_400
LOG_BYTES = 5_400  # a stream with its first node, which Redis allocates at 4 KiB
TOKEN_BYTES = 24  # a token of a log without log probabilities; 19 measured
_TOKEN_HEAD = 32  # a token with log probabilities: mark, id and count, and the stream's own 16 bytes around each entry
REDIS_BYTES = 12 << 20
"""Memory of a Redis without requests: 2 MiB of its own, and 10 MiB that 6.2 allocates at once to rewrite its
append-only file. Redis excludes those from its count only as far as they are used."""
_LOGPROB_HEAD = struct.Struct("<IdI")
_LOGPROB_TOP = struct.Struct("<Id")
_CACHED_BYTES = 5  # mark and number before token 0
_U32 = struct.Struct("<I")
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
_LISTS = ("stop_token_ids", "stop", "allowed_token_ids", "forbidden_token_ids")


def pack_bodies(requests: Iterable[Request]) -> list[bytes]:
    """Pack each request as `pack_body` does. Choices that share a prompt's ids have them packed once."""
    bodies, prompt, packed = [], None, b""
    for request in requests:
        if request.prompt is not prompt:
            prompt, packed = request.prompt, _pack_u32s(request.prompt)
        bodies.append(_pack_head(request) + packed)
    return bodies


def pack_body(request: Request) -> bytes:
    """Pack what never changes of a request. The pool's own `arrival` and `submitted_ms` are left out."""
    return _pack_head(request) + _pack_u32s(request.prompt)


def _pack_head(request: Request) -> bytes:
    """Pack the part of a body before its prompt."""
    fields_of_header = [
        request.parent,
        request.choice,
        request.revision,
        request.max_new_tokens,
        named_fields(request.sampling, _SAMPLING_FIELDS),
        request.deadline_ms,
        request.traceparent,
    ]
    # What says nothing is left out at the end: such a body equals one from before the field existed.
    named = named_fields(request, SCHEMA_3_FIELDS)
    if request.first_token_deadline_ms is not None or named:
        fields_of_header.append(request.first_token_deadline_ms)
    if named:
        fields_of_header.append(named)
    header = orjson.dumps(fields_of_header)
    return _U32.pack(len(header)) + header


def unpack_body(body: bytes, *, arrival: int, submitted_ms: int) -> Request:
    """Return the request that `pack_body` packed, with the two fields that the pool added."""
    header_end = 4 + _U32.unpack_from(body)[0]
    header = orjson.loads(body[4:header_end])
    parent, choice, revision, max_new_tokens, sampling, deadline_ms, traceparent, *more = header
    named = {name: value for name, value in (more[1] if more[1:] else {}).items() if name in SCHEMA_3_FIELDS}
    named["decoder_prefix"] = tuple(named.get("decoder_prefix", ()))
    return Request(
        parent=parent,
        choice=choice,
        revision=revision,
        prompt=_unpack_u32s(body[header_end:]),
        max_new_tokens=max_new_tokens,
        sampling=_unpack_sampling(sampling),
        deadline_ms=deadline_ms,
        first_token_deadline_ms=more[0] if more else None,
        traceparent=traceparent,
        arrival=arrival,
        submitted_ms=submitted_ms,
        **named,
    )


def is_plain(token: Token) -> bool:
    """Return true if the token is its id and nothing else."""
    return token.logprob is None and not token.prompt_logprobs and token.cached_prompt_tokens is None


def pack_token(token: Token) -> bytes:
    if token.cached_prompt_tokens is not None:
        return b"C" + _U32.pack(token.cached_prompt_tokens) + pack_token(token._replace(cached_prompt_tokens=None))
    if is_plain(token):
        return b"%d" % token.id
    own = b"\0" if token.logprob is None else b"\1" + _pack_logprob(token.logprob)
    prompt = b"".join(map(_pack_logprob, token.prompt_logprobs))
    return b"L" + _U32.pack(token.id) + own + _U32.pack(len(token.prompt_logprobs)) + prompt


def unpack_token(value: bytes) -> Token:
    if value[:1] == b"C":
        return unpack_token(value[_CACHED_BYTES:])._replace(cached_prompt_tokens=_U32.unpack_from(value, 1)[0])
    if value[:1] != b"L":
        return Token(int(value))
    token_id, offset, own = _U32.unpack_from(value, 1)[0], 6, None
    if value[5]:
        own, offset = _unpack_logprob(value, offset)
    prompt = []
    count = _U32.unpack_from(value, offset)[0]
    offset += 4
    for _ in range(count):
        logprob, offset = _unpack_logprob(value, offset)
        prompt.append(logprob)
    return Token(token_id, own, tuple(prompt))


def pack_reason(end: End) -> str:
    """Return the `end` field of an end: its reason."""
    return (FinishReason.ERROR if end.reason is FinishReason.REFUSED else end.reason).value


def pack_stop(end: End) -> bytes:
    """Return the `stop` field of an end; empty if nothing stopped it."""
    stop = end.detail if end.detail is not None else end.stop
    return b"" if stop is None else orjson.dumps(stop)


def unpack_end(reason: bytes, count: bytes, stop: bytes = b"") -> End:
    found, value = FinishReason(reason.decode()), orjson.loads(stop) if stop else None
    if found is FinishReason.ERROR and value is not None:
        return End(FinishReason.REFUSED, int(count), detail=value)
    if found is FinishReason.DEADLINE_EXCEEDED:
        return End(found, int(count), detail=value)
    return End(found, int(count), value)


def token_bytes(sampling: SamplingParams) -> int:
    """Return the bytes that one token of the log may use."""
    return TOKEN_BYTES if sampling.logprobs is None else _in_nodes(_TOKEN_HEAD + _logprob_bytes(sampling.logprobs))


def fixed_bytes(request: Request, body: bytes) -> int:
    """Return the bytes that do not depend on the tokens: record, queue place, body, empty log with its end."""
    asked = request.sampling.prompt_logprobs
    prompt = 0 if asked is None else _in_nodes(_TOKEN_HEAD + len(request.prompt) * _logprob_bytes(asked))
    return REQUEST_BYTES + LOG_BYTES + len(body) + prompt + _CACHED_BYTES


def parent_bytes(render: str, conversation: str | None = None) -> int:
    """Return the bytes that a parent uses beside its requests; its first request reserves them."""
    return PARENT_BYTES + len(render.encode()) + len((conversation or "").encode())


def _in_nodes(size: int) -> int:
    """Return the bytes of memory for large entries.

    Few of them fit into a node of the stream, whose rest is wasted. Each node has its own place in the tree above, and
    the allocator rounds up by a fifth at most.
    """
    return size * 5 // 4 + 16


def room_for_requests(maxmemory: int) -> int:
    """Return the bytes that requests may reserve; the rest is for Redis itself and for what its tables waste."""
    return max(0, maxmemory * 4 // 5 - REDIS_BYTES)


def _logprob_bytes(top: int) -> int:
    return _LOGPROB_HEAD.size + top * _LOGPROB_TOP.size


def _pack_logprob(logprob: Logprob) -> bytes:
    head = _LOGPROB_HEAD.pack(logprob.token, logprob.logprob, len(logprob.top))
    return head + b"".join(_LOGPROB_TOP.pack(token, value) for token, value in logprob.top)


def _unpack_logprob(value: bytes, offset: int) -> tuple[Logprob, int]:
    """Return the log probability at the offset, and the offset after it."""
    token, own, count = _LOGPROB_HEAD.unpack_from(value, offset)
    offset += _LOGPROB_HEAD.size
    end = offset + count * _LOGPROB_TOP.size
    return Logprob(token, own, tuple(_LOGPROB_TOP.iter_unpack(value[offset:end]))), end


def _unpack_sampling(values: dict[str, Any]) -> SamplingParams:
    # JSON has only lists: these fields are tuples.
    if "logit_bias" in values:
        values["logit_bias"] = tuple((token, bias) for token, bias in values["logit_bias"])
    for name in _LISTS:
        if name in values:
            values[name] = tuple(values[name])
    if "forbidden_sequences" in values:
        values["forbidden_sequences"] = tuple(map(tuple, values["forbidden_sequences"]))
    return SamplingParams(**{name: value for name, value in values.items() if name in _SAMPLING_FIELDS})


def _pack_u32s(numbers: Sequence[int]) -> bytes:
    packed = array("I", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack_u32s(packed: bytes) -> tuple[int, ...]:
    numbers = array("I", packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)
