"""The load client, against a server that says exactly what a test tells it to say."""

import asyncio

import orjson

from orca.bench.client import run_trace, served_models
from orca.planner.simulate.outcomes import RequestOutcome
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import TraceSpec, generate
from support.bench.fake_completions import HEAD, Answer, chunk, event, serving, token, usage


async def run(
    answer: Answer, *, requests: int = 1, new_tokens: int = 3, rate: float | None = None
) -> list[RequestOutcome]:
    spec = TraceSpec(requests=requests, prompt_tokens=Range(4, 4), new_tokens=Range(new_tokens, new_tokens), rate=rate)
    async with serving(answer) as target:
        return await run_trace(target, generate(spec))


def writes(*parts: bytes) -> Answer:
    async def answer(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


async def test_a_stream_of_exactly_its_tokens_succeeds() -> None:
    events = [token(0), token(1), token(2), usage(3), event(b"[DONE]")]
    [outcome] = await run(writes(HEAD, *map(chunk, events)))
    assert outcome.error is None
    assert outcome.token_ids == (0, 1, 2)
    assert 0 <= outcome.sent_s <= outcome.token_s[0] <= outcome.token_s[2] <= outcome.end_s


async def test_events_may_be_cut_at_any_byte() -> None:
    stream = HEAD + chunk(token(0) + token(1)[:9]) + chunk(token(1)[9:] + token(2) + event(b"[DONE]"))
    [outcome] = await run(writes(*(stream[at : at + 1] for at in range(len(stream)))))
    assert (outcome.error, outcome.token_ids) == (None, (0, 1, 2))


async def test_the_request_asks_for_a_stream_of_exactly_the_given_number_of_tokens() -> None:
    seen: list[dict[str, object]] = []

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        seen.append(body)
        writer.write(HEAD + chunk(event(b"[DONE]")))

    await run(answer)
    [body] = seen
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("m", 3, True, True)
    prompt = body["prompt"]
    assert isinstance(prompt, list)
    assert len(prompt) == 4
    assert all(0 <= token_id < 50 for token_id in prompt)


async def test_a_token_too_few_is_an_error() -> None:
    [outcome] = await run(writes(HEAD + chunk(token(0) + token(1) + event(b"[DONE]"))))
    assert outcome.error == "not as many tokens as max_tokens"


async def test_usage_that_differs_from_what_was_asked_is_an_error() -> None:
    [outcome] = await run(writes(HEAD + chunk(token(0) + token(1) + token(2) + usage(2) + event(b"[DONE]"))))
    assert outcome.error == "usage.completion_tokens is not max_tokens"


async def test_the_usage_counts_for_a_server_without_token_ids() -> None:
    text = event({"choices": [{"text": "two words", "finish_reason": None}]})
    [outcome] = await run(writes(HEAD + chunk(text + usage(3) + event(b"[DONE]"))))
    assert (outcome.error, len(outcome.token_s)) == (None, 1)


async def test_a_refusal_is_an_error_with_status_and_message() -> None:
    body = orjson.dumps({"error": {"message": "the pool is full"}})
    head = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n" % len(body)
    [outcome] = await run(writes(head + body))
    assert outcome.error == "HTTP 429: the pool is full"


async def test_an_error_in_the_stream_is_an_error() -> None:
    [outcome] = await run(writes(HEAD + chunk(token(0) + event({"error": {"message": "gone"}}))))
    assert outcome.error == "in the stream: gone"


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    [outcome] = await run(writes(HEAD + chunk(token(0))))
    assert outcome.error == "the stream broke off before [DONE]"


async def test_an_answer_that_is_not_a_stream_of_completions_is_an_error() -> None:
    [outcome] = await run(writes(HEAD + chunk(b"data: {oops\n\n")))
    assert outcome.error is not None
    assert outcome.error.startswith("not a stream of completions")


async def test_an_unreachable_server_is_an_error_of_each_request() -> None:
    async with serving(writes()) as target:
        pass
    trace = generate(TraceSpec(requests=2, prompt_tokens=Range(1, 1), new_tokens=Range(1, 1)))
    outcomes = await run_trace(target, trace)
    assert [(outcome.error or "").split(":")[0] for outcome in outcomes] == ["connection", "connection"]


async def test_a_late_answer_delays_no_other_request() -> None:
    """Open loop: the first request is answered only when the last one has come."""
    came: list[asyncio.StreamWriter] = []
    everybody = asyncio.Event()

    async def answer(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        came.append(writer)
        if len(came) == 5:
            everybody.set()
        await everybody.wait()
        writer.write(HEAD + chunk(token(0) + event(b"[DONE]")))

    outcomes = await run(answer, requests=5, new_tokens=1, rate=200.0)
    assert [outcome.error for outcome in outcomes] == [None] * 5
    assert min(outcome.end_s for outcome in outcomes) >= max(outcome.sent_s for outcome in outcomes)


async def test_the_served_models_are_read() -> None:
    body = orjson.dumps({"data": [{"id": "orca-small"}]})
    async with serving(writes(b"HTTP/1.1 200 OK\r\n\r\n" + body)) as target:
        assert await served_models(target) == ["orca-small"]
