"""The arguments of the script `submit`, by name: what Python writes in this order, Lua reads in it.

The fields below are the only list of them. In the script they are tables, `PARENT_WORDS` and `REQUEST_WORDS`.
"""

from typing import NamedTuple

from orca.core.domain.request import Request
from orca.pool import codec
from orca.pool.contract import reserved_bytes
from orca.pool.records import Submission
from orca.pool.settings import PoolSettings

Word = str | bytes | int


class ParentWords(NamedTuple):
    """Of the submission; behind them come those of its requests."""

    parent: str
    revision: str
    reader: str
    on_disconnect: str
    render: str
    reader_lease_ms: int
    grace_ms: int
    max_queued: int
    bytes_max: int
    reserved: int  # bytes, of all requests
    choices: int
    max_queued_prompt_tokens: int
    owner: str
    digest: str


class RequestWords(NamedTuple):
    """Of each request."""

    body: bytes
    need: int
    prompt_tokens: int
    max_new: int
    reserved: int  # bytes
    token_bytes: int
    deadline_ms: int | str  # empty without one, as the next
    first_token_deadline_ms: int | str


def submit_words(submission: Submission, settings: PoolSettings) -> list[Word]:
    """The arguments that store a submission."""
    bodies = codec.pack_bodies(submission.requests)
    reserved = [reserved_bytes(submission, choice, body) for choice, body in enumerate(bodies)]
    parent = ParentWords(
        parent=submission.parent,
        revision=submission.requests[0].revision,
        reader=submission.reader,
        on_disconnect=submission.on_disconnect.value,
        render=submission.render,
        reader_lease_ms=settings.reader_lease_ms,
        grace_ms=settings.resume_grace_ms,
        max_queued=settings.max_queued,
        bytes_max=settings.bytes_max,
        reserved=sum(reserved),
        choices=len(bodies),
        max_queued_prompt_tokens=settings.max_queued_prompt_tokens,
        owner=submission.owner,
        digest=submission.digest,
    )
    words: list[Word] = [*parent]
    for request, body, size in zip(submission.requests, bodies, reserved, strict=True):
        words += _request_words(request, body, size)
    return words


def _request_words(request: Request, body: bytes, size: int) -> RequestWords:
    first_token_deadline_ms = request.first_token_deadline_ms
    return RequestWords(
        need=request.max_total_tokens,
        prompt_tokens=len(request.prompt),
        max_new=request.max_new_tokens,
        reserved=size,
        token_bytes=codec.token_bytes(request.sampling),
        deadline_ms="" if request.deadline_ms is None else request.deadline_ms,
        first_token_deadline_ms="" if first_token_deadline_ms is None else first_token_deadline_ms,
        body=body,
    )


def lua() -> str:
    """For the head of each script."""
    tables = {"PARENT_WORDS": ParentWords, "REQUEST_WORDS": RequestWords}
    lines = [f"local {name} = {{ {_quoted(words)} }}\n" for name, words in tables.items()]
    return "".join(lines)


def _quoted(words: type[ParentWords] | type[RequestWords]) -> str:
    return ", ".join(f"'{name}'" for name in words._fields)
