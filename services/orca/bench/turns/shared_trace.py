"""Reads a public trace whose prompts share beginnings: the conversations of Mooncake, as JSON lines.

    {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 7, 8]}

The time is in milliseconds. There is an id for each block of 512 prompt tokens, the last one of which may be shorter.
Equal ids are equal prefixes: they stand for the same tokens after the same tokens. So an id always follows the same id.

The file has no tokens. A prompt gets some that are equal where ids are equal, and differ where ids differ. All lengths
can be divided by a whole number, for smaller models. A block of a prompt then has 512 divided by that number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from orca.core.domain.errors import SettingError
from orca.planner.workload.lengths import LENGTH_MAX, Range
from orca.planner.workload.lengths_file import BadLine
from orca.planner.workload.trace import Trace, TraceRequest, TraceSpec

BLOCK_TOKENS = 512
"""Prompt tokens of an id in the file."""

ID_MAX = 2**31 // BLOCK_TOKENS - 1
"""The largest id, so that the tokens of its block are below 2^31."""

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class SharedRequest:
    """A request of the file. Its lengths are divided already."""

    arrival_ms: int
    prompt_tokens: int
    new_tokens: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTrace:
    """The requests of a file in order of arrival.

    Args: block_tokens: prompt tokens of an id.
    """

    source: str
    block_tokens: int
    requests: tuple[SharedRequest, ...]

    def prompt(self, index: int) -> tuple[int, ...]:
        """Return the token ids of a prompt. They are made at every call: a file may have millions."""
        request, size = self.requests[index], self.block_tokens
        blocks = (range(each * size, (each + 1) * size) for each in request.ids)
        return tuple(chain.from_iterable(blocks))[: request.prompt_tokens]

    def trace(self, time_factor: float) -> Trace:
        """Return arrivals and lengths. Args: time_factor: multiplies the times of arrival."""
        requests = [
            TraceRequest(index, each.arrival_ms * time_factor / 1_000, each.prompt_tokens, each.new_tokens)
            for index, each in enumerate(self.requests)
        ]
        prompts = [each.prompt_tokens for each in requests]
        outputs = [each.new_tokens for each in requests]
        spec = TraceSpec(
            requests=len(requests),
            prompt_tokens=Range(min(prompts), max(prompts)),
            new_tokens=Range(min(outputs), max(outputs)),
        )
        return Trace(spec, tuple(requests))

    @property
    def prompt_tokens(self) -> int:
        return sum(each.prompt_tokens for each in self.requests)

    @property
    def distinct_tokens(self) -> int:
        """Prompt tokens, of which those of equal ids count once."""
        return self.prompt_tokens - sum(self._known())

    def found_at_most(self, kv_block_tokens: int) -> int:
        """Return the prompt tokens that a cache without bound finds if each request ends before the next one comes."""
        found = (
            min(known, request.prompt_tokens - 1) // kv_block_tokens * kv_block_tokens
            for known, request in zip(self._known(), self.requests, strict=True)
        )
        return sum(found)

    def _known(self) -> Iterator[int]:
        """Yield, for each request, the tokens of its ids that are in prompts before it. They are its first ones."""
        seen: set[int] = set()
        for request in self.requests:
            known = sum(each in seen for each in request.ids)
            seen.update(request.ids)
            yield min(known * self.block_tokens, request.prompt_tokens)


def read_shared_trace(path: Path, *, divisor: int = 1, requests_max: int | None = None) -> SharedTrace:
    """Return the trace of a file.

    Args:
        divisor: of all lengths, a divisor of 512. Shorter lengths are rounded up.
        requests_max: requests to read, from the first one on; None: all.
    Raises: SettingError with the file, the line and the reason.
    """
    if divisor < 1 or BLOCK_TOKENS % divisor:
        raise SettingError(f"lengths are divided by a divisor of {BLOCK_TOKENS}, not by {divisor}")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} cannot be read: {error}") from error
    reader = _Reader(divisor)
    try:
        for number, line in enumerate(lines, start=1):
            if len(reader.requests) == requests_max:
                break
            if line.strip():
                reader.read(number, line)
    except BadLine as error:
        raise SettingError(f"{path}, {error}") from error
    if not reader.requests:
        raise SettingError(f"{path} has no requests")
    source = path.name if divisor == 1 else f"{path.name} / {divisor}"
    return SharedTrace(source=source, block_tokens=BLOCK_TOKENS // divisor, requests=tuple(reader.requests))


class _Reader:
    """Reads lines, and checks that equal ids are equal prefixes."""

    def __init__(self, divisor: int) -> None:
        self.requests: list[SharedRequest] = []
        self._divisor = divisor
        self._blocks: dict[int, tuple[int | None, int]] = {}  # id -> the id before it, tokens of its block

    def read(self, number: int, line: str) -> None:
        """Add the request of a line. Raises: BadLine."""
        content = _parsed(number, line)
        arrival_ms = _whole(number, "timestamp", content["timestamp"], least=0)
        if self.requests and arrival_ms < self.requests[-1].arrival_ms:
            before = self.requests[-1].arrival_ms
            raise BadLine(number, f"timestamp {arrival_ms} is before that of the request before it, {before}")
        prompt = _whole(number, "input_length", content["input_length"], least=1)
        output = _whole(number, "output_length", content["output_length"], least=1)
        ids = content["hash_ids"]
        if not isinstance(ids, list):
            raise BadLine(number, f"hash_ids are a list, not {str(ids)[:40]!r}")
        if len(ids) != (needed := -(-prompt // BLOCK_TOKENS)):
            raise BadLine(number, f"{prompt} prompt tokens have {needed} hash_ids, not {len(ids)}")
        before_id = None
        for place, each in enumerate(ids):
            found = _whole(number, "a hash id", each, least=0, most=ID_MAX)
            self._check_block(number, found, (before_id, min(BLOCK_TOKENS, prompt - place * BLOCK_TOKENS)))
            before_id = found
        self.requests.append(SharedRequest(arrival_ms, self._shorter(prompt), self._shorter(output), tuple(ids)))

    def _shorter(self, length: int) -> int:
        return -(-length // self._divisor)

    def _check_block(self, number: int, hash_id: int, block: tuple[int | None, int]) -> None:
        known = self._blocks.setdefault(hash_id, block)
        if known[0] != block[0]:
            after = ("the first one" if each is None else f"after {each}" for each in (block[0], known[0]))
            raise BadLine(number, "hash id {} is {}, and {} in a line before".format(hash_id, *after))
        if known[1] != block[1]:
            raise BadLine(number, f"hash id {hash_id} is of {block[1]} tokens, and of {known[1]} in a line before")


def _parsed(number: int, line: str) -> dict[str, Any]:
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadLine(number, f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadLine(number, "not a JSON object")
    if missing := [name for name in FIELDS if name not in content]:
        raise BadLine(number, f"an object needs {', '.join(FIELDS)}; {', '.join(missing)} is missing")
    return content


def _whole(number: int, name: str, value: object, *, least: int, most: int = LENGTH_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadLine(number, f"{name} is a whole number, not {str(value)[:40]!r}")
    if not least <= value <= most:
        raise BadLine(number, f"{name} is from {least} to {most:,}, not {value}")
    return value
