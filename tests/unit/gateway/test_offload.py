"""Long answers are rendered while the event loop runs: many choices, long texts, and echoed prompts."""

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest

from orca.core.domain.request import End, FinishReason, Request, Token
from orca.gateway.answer.delivery import AcceptedCall, CallTiming, StreamDelivery
from orca.gateway.answer.log_watcher import LogSubscription, LogWatcher
from orca.gateway.answer.offload import INLINE_TOKENS, write_answer, write_text
from orca.gateway.limits.drain import Drain
from orca.gateway.metrics import GatewayMetrics
from orca.gateway.render.render import AnswerKind, ChoiceStream, RenderModel, RenderOptions, stream_end, text_so_far
from orca.pool.memory.pool import MemoryPool
from orca.pool.records import LogSlice
from support.gateway.gateway_rig import WallClock, eos, ids, make_request, scripted, tokenizer, turns_during

READING = RenderModel(tokenizer(), frozenset({eos()}))
RENDERING = RenderOptions(kind=AnswerKind.COMPLETION, model="tiny", created=1)


def choices(count: int, tokens: int) -> tuple[list[Request], list[tuple[list[Token], End]]]:
    log = [Token(one) for one in (ids("the fox jumps over the dog ") * tokens)[:tokens]]
    requests = [make_request(choice=choice) for choice in range(count)]
    return requests, [(log, End(FinishReason.LENGTH, tokens))] * count


@pytest.mark.parametrize(("count", "tokens"), [(50, 3), (2, 50 * INLINE_TOKENS)])
async def test_the_event_loop_runs_other_work_while_an_answer_is_rendered(count: int, tokens: int) -> None:
    requests, logs = choices(count, tokens)
    assert await turns_during(write_answer(requests, RENDERING, logs, READING)) >= 20


async def test_a_long_text_is_the_same_rendered_in_a_thread_or_in_the_event_loop() -> None:
    [request], [(tokens, end)] = choices(1, 2 * INLINE_TOKENS)
    beside = await write_text(request, RENDERING, tokens, end, READING)
    assert beside == text_so_far(request, RENDERING, tokens, end, READING)


async def test_a_whole_answer_has_its_choices_in_order() -> None:
    requests, logs = choices(3, 2)
    logs[1] = choices(1, 2 * INLINE_TOKENS)[1][0]
    answer = orjson.loads(await write_answer(requests, RENDERING, logs, READING))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(answer["choices"][1]["text"]) > len(answer["choices"][2]["text"])


async def test_the_event_loop_runs_other_work_while_long_prompts_are_echoed_one_by_one() -> None:
    prompt = (ids("the fox ") * 20 * INLINE_TOKENS)[: 20 * INLINE_TOKENS]
    requests = [replace(make_request(choice=choice, logprobs=1, prompt_logprobs=1), prompt=prompt) for choice in (0, 1)]
    rendering = replace(RENDERING, echo=True)
    logs = {request.id: LogSlice(0, *scripted(request, ids("ab"))) for request in requests}
    subscription = LogSubscription(LogWatcher(MemoryPool(WallClock())), logs)
    for request_id, log in logs.items():
        subscription.add(request_id, log)
    accepted = AcceptedCall(
        requests=requests,
        options=rendering,
        subscription=subscription,
        timing=CallTiming(0.0),
        remove_reader=lambda _: None,
    )
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        if message.get("body"):
            sent.append(message["body"])

    async def receive() -> Any:
        await asyncio.Event().wait()

    delivery = StreamDelivery(accepted, READING, GatewayMetrics("tiny"), Drain(), keep_alive_s=60)
    assert await turns_during(delivery({"type": "http"}, receive, send)) >= 20
    expected = []
    for request, log in zip(requests, logs.values(), strict=True):
        stream = ChoiceStream(request, rendering, READING)
        expected.append(b"".join([*map(stream.token, log.tokens), stream.end(log.end)]))
    expected[-1] += stream_end(requests, rendering, [log.end for log in logs.values()])
    assert sent == expected
