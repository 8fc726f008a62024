"""Renders long answers in a thread, so that other streams of the event loop go on meanwhile.

Whole answers are rendered one choice at a time, long choices in the thread. So is the first event of a stream that
echoes a long prompt. All share one thread: Python runs one thread at a time anyway, and each further one would only
take time from the loop. Answers that are rendered together take turns by choice.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from orca.core.domain.request import End, Request, Token
from orca.gateway.render.render import AnswerKind, RenderModel, RenderOptions, text_so_far, whole_answer, whole_choice
from orca.gateway.responses.response import output_items, write_response

T = TypeVar("T")

INLINE_TOKENS = 256
"""More tokens are rendered in the thread; this many take a millisecond or two of the loop."""

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="render")


async def write_answer(
    requests: Sequence[Request],
    options: RenderOptions,
    logs: Sequence[tuple[Sequence[Token], End]],
    render_model: RenderModel,
) -> bytes:
    """Render the answer to a call that does not stream. No choice may have failed (see `end_error`)."""
    if options.kind is AnswerKind.RESPONSE:
        (request,), ((tokens, end),) = requests, logs
        return await render_response(request, options, tokens, end, render_model)
    choices = [
        await _render(
            _token_count(request, options, tokens), partial(whole_choice, request, options, tokens, end, render_model)
        )
        for request, (tokens, end) in zip(requests, logs, strict=True)
    ]
    return whole_answer(requests, options, choices, [end for _, end in logs])


async def render_response(
    request: Request,
    options: RenderOptions,
    tokens: Sequence[Token],
    end: End | None,
    render_model: RenderModel,
    *,
    status: str = "in_progress",
) -> bytes:
    """Render a response from its log. Args: status: of one without an end."""
    write = partial(write_response, request, options, tokens, end, render_model, status=status)
    return await _render(len(tokens), write)


async def read_output(
    request: Request, options: RenderOptions, tokens: Sequence[Token], end: End, render_model: RenderModel
) -> list[dict[str, Any]]:
    """Read the output items of a response that has ended from its log."""
    return await _render(len(tokens), partial(output_items, request, options, tokens, end, render_model))


async def write_text(
    request: Request, options: RenderOptions, tokens: Sequence[Token], end: End | None, render_model: RenderModel
) -> str:
    """Render the text of a choice from its tokens, and from its end if it has ended."""
    return await _render(
        _token_count(request, options, tokens), partial(text_so_far, request, options, tokens, end, render_model)
    )


def _token_count(request: Request, options: RenderOptions, tokens: Sequence[Token]) -> int:
    """Count the tokens that are rendered for a choice."""
    return len(tokens) + (len(request.prompt) if options.echo else 0)


def is_long(token_count: int) -> bool:
    """Return whether this many tokens are to be rendered in the thread."""
    return token_count > INLINE_TOKENS


async def in_thread(render: Callable[[], T]) -> T:
    """Render in the thread."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, render)


async def _render(token_count: int, render: Callable[[], T]) -> T:
    if is_long(token_count):
        return await in_thread(render)
    rendered = render()
    # There may be many short choices: let other tasks run between them.
    await asyncio.sleep(0)
    return rendered
