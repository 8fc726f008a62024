"""Rendering of what is long beside the loop, whose streams go on meanwhile: whole answers a choice at a time, long ones
in a thread, and there also the first event of a stream that echoes a long prompt.

One thread for all of them, since Python computes in one at a time anyway and each more would only take turns from the
loop. Answers that are rendered together take turns by choice.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from orca.core.domain.request import End, Request, Token
from orca.gateway.render.render import RenderModel, RenderOptions, text_so_far, whole_answer, whole_choice

T = TypeVar("T")

INLINE_TOKENS = 256
"""More are rendered in the thread; so many take a millisecond or two of the loop."""

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="render")


async def write_answer(
    requests: Sequence[Request],
    options: RenderOptions,
    logs: Sequence[tuple[Sequence[Token], End]],
    render_model: RenderModel,
) -> bytes:
    """The answer to a call that does not stream. No choice may have failed (see `end_error`)."""
    choices = [
        await _offload(
            _weight(request, options, tokens), partial(whole_choice, request, options, tokens, end, render_model)
        )
        for request, (tokens, end) in zip(requests, logs, strict=True)
    ]
    return whole_answer(requests, options, choices, [end for _, end in logs])


async def write_text(
    request: Request, options: RenderOptions, tokens: Sequence[Token], end: End | None, render_model: RenderModel
) -> str:
    """The text of a choice that these tokens bring, and its end where there is one."""
    return await _offload(
        _weight(request, options, tokens), partial(text_so_far, request, options, tokens, end, render_model)
    )


def _weight(request: Request, options: RenderOptions, tokens: Sequence[Token]) -> int:
    """Tokens that are rendered for a choice."""
    return len(tokens) + (len(request.prompt) if options.echo else 0)


def is_long(weight: int) -> bool:
    """Args: weight: tokens to render."""
    return weight > INLINE_TOKENS


async def in_thread(render: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREAD, render)


async def _offload(weight: int, render: Callable[[], T]) -> T:
    if is_long(weight):
        return await in_thread(render)
    rendered = render()
    # There may be many short choices: others have their turn between them.
    await asyncio.sleep(0)
    return rendered
