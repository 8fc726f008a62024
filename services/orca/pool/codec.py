"""Requests, tokens and ends as the bytes that lie in Redis, and what they weigh.

body:  u32 length of the header | header, JSON | prompt, u32 per token           (little-endian)
token: the id in decimal, which Redis packs into one to four bytes; or, where log probabilities were asked for,
       "L" | u32 id | u32 n | n x logprob, the token's own first (present = 1 byte before it), then the prompt's
logprob: u32 token | f64 logprob | u32 n | n x (u32 token, f64 logprob)
end:   reason, count, and stop: as JSON where there is one, else empty

entry of a log: stream fields `token`, or `end`, `count` and `stop`; from schema 2 on then `claim`, the number of the
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

# Bytes of Redis memory, measured on 6.2 and 7.0 (`python -m pytest tests/pool -k weigh`) and rounded up. They are what
# admission reserves, so they bound from above; a waiting request in truth takes about two thirds of REQUEST_BYTES.
PARENT_BYTES = 800
REQUEST_BYTES = 1_400
LOG_BYTES = 5_400  # a stream with its first node, which Redis allocates at 4 KiB
TOKEN_BYTES = 24  # of a log without log probabilities; 19 measured
_TOKEN_HEAD = 32  # of one with them: mark, id and count, and the stream's own 16 bytes around each entry
REDIS_BYTES = 12 << 20
"""Of a Redis without requests: 2 MiB of its own, and 10 MiB that 6.2 takes at once to write its append-only file anew,
which it leaves out of its count only as far as they are used."""
_LOGPROB_HEAD = struct.Struct("<IdI")
_LOGPROB_TOP = struct.Struct("<Id")
_U32 = struct.Struct("<I")
_DEFAULT_SAMPLING = SamplingParams()


def pack_bodies(requests: Iterable[Request]) -> list[bytes]:
    """As `pack_body` of each; the choices of a prompt that share its ids have them packed once."""
    bodies, prompt, packed = [], None, b""
    for request in requests:
        if request.prompt is not prompt:
            prompt, packed = request.prompt, _pack_u32s(request.prompt)
        bodies.append(_pack_head(request) + packed)
    return bodies


def pack_body(request: Request) -> bytes:
    """What never changes of a request; `arrival` and `submitted_ms` are the pool's and stay out."""
    return _pack_head(request) + _pack_u32s(request.prompt)


def _pack_head(request: Request) -> bytes:
    """All of a body before its prompt."""
    sampling = {
        field.name: value
        for field in fields(SamplingParams)
        if (value := getattr(request.sampling, field.name)) != getattr(_DEFAULT_SAMPLING, field.name)
    }
    fields_of_header = [
        request.parent,
        request.choice,
        request.revision,
        request.max_new_tokens,
        sampling,
        request.deadline_ms,
        request.traceparent,
    ]
    if request.first_token_deadline_ms is not None:
        # Last and only where there is one, so that bodies without it are what they were before there were any.
        fields_of_header.append(request.first_token_deadline_ms)
    header = orjson.dumps(fields_of_header)
    return _U32.pack(len(header)) + header


def unpack_body(body: bytes, *, arrival: int, submitted_ms: int) -> Request:
    """The request that `pack_body` was given, with what the pool added."""
    header_end = 4 + _U32.unpack_from(body)[0]
    header = orjson.loads(body[4:header_end])
    parent, choice, revision, max_new_tokens, sampling, deadline_ms, traceparent, *first_token_deadline_ms = header
    return Request(
        parent=parent,
        choice=choice,
        revision=revision,
        prompt=_unpack_u32s(body[header_end:]),
        max_new_tokens=max_new_tokens,
        sampling=_unpack_sampling(sampling),
        deadline_ms=deadline_ms,
        first_token_deadline_ms=first_token_deadline_ms[0] if first_token_deadline_ms else None,
        traceparent=traceparent,
        arrival=arrival,
        submitted_ms=submitted_ms,
    )


def is_plain(token: Token) -> bool:
    """Is it its id and nothing else?"""
    return token.logprob is None and not token.prompt_logprobs


def pack_token(token: Token) -> bytes:
    if is_plain(token):
        return b"%d" % token.id
    own = b"\0" if token.logprob is None else b"\1" + _pack_logprob(token.logprob)
    prompt = b"".join(map(_pack_logprob, token.prompt_logprobs))
    return b"L" + _U32.pack(token.id) + own + _U32.pack(len(token.prompt_logprobs)) + prompt


def unpack_token(value: bytes) -> Token:
    if value[:1] != b"L":
        return Token(int(value))
    token_id, at, own = _U32.unpack_from(value, 1)[0], 6, None
    if value[5]:
        own, at = _unpack_logprob(value, at)
    prompt = []
    count = _U32.unpack_from(value, at)[0]
    at += 4
    for _ in range(count):
        logprob, at = _unpack_logprob(value, at)
        prompt.append(logprob)
    return Token(token_id, own, tuple(prompt))


def pack_stop(end: End) -> bytes:
    """The `stop` field of an end; empty when there is none."""
    return b"" if end.stop is None else orjson.dumps(end.stop)


def unpack_end(reason: bytes, count: bytes, stop: bytes = b"") -> End:
    return End(FinishReason(reason.decode()), int(count), orjson.loads(stop) if stop else None)


def token_bytes(sampling: SamplingParams) -> int:
    """Bytes that one token of the log may take."""
    return TOKEN_BYTES if sampling.logprobs is None else _in_nodes(_TOKEN_HEAD + _logprob_bytes(sampling.logprobs))


def fixed_bytes(request: Request, body: bytes) -> int:
    """Bytes that a request takes however many tokens it writes: record, queue place, body, empty log with its end."""
    asked = request.sampling.prompt_logprobs
    prompt = 0 if asked is None else _in_nodes(_TOKEN_HEAD + len(request.prompt) * _logprob_bytes(asked))
    return REQUEST_BYTES + LOG_BYTES + len(body) + prompt


def parent_bytes(render: str) -> int:
    """Bytes that a parent takes beside its requests; the first of them carries them."""
    return PARENT_BYTES + len(render.encode())


def _in_nodes(size: int) -> int:
    """Bytes of memory for large entries: few fit into a node of the stream, its rest is lost, each has its own place
    in the tree above, and the allocator rounds up by a fifth at most."""
    return size * 5 // 4 + 16


def room_for_requests(maxmemory: int) -> int:
    """Bytes that requests may be promised in a Redis of so many: the rest is Redis' own, and what its tables waste."""
    return max(0, maxmemory * 4 // 5 - REDIS_BYTES)


def _logprob_bytes(top: int) -> int:
    return _LOGPROB_HEAD.size + top * _LOGPROB_TOP.size


def _pack_logprob(logprob: Logprob) -> bytes:
    head = _LOGPROB_HEAD.pack(logprob.token, logprob.logprob, len(logprob.top))
    return head + b"".join(_LOGPROB_TOP.pack(token, value) for token, value in logprob.top)


def _unpack_logprob(value: bytes, at: int) -> tuple[Logprob, int]:
    token, own, count = _LOGPROB_HEAD.unpack_from(value, at)
    at += _LOGPROB_HEAD.size
    end = at + count * _LOGPROB_TOP.size
    return Logprob(token, own, tuple(_LOGPROB_TOP.iter_unpack(value[at:end]))), end


def _unpack_sampling(values: dict[str, Any]) -> SamplingParams:
    # JSON has lists only: these three are tuples.
    if "logit_bias" in values:
        values["logit_bias"] = tuple((token, bias) for token, bias in values["logit_bias"])
    for name in ("stop_token_ids", "stop"):
        if name in values:
            values[name] = tuple(values[name])
    return SamplingParams(**values)


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
