"""Unmodified clients at two gateway processes: one is killed in the middle of a response, the other goes on."""

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Literal

import agents
import httpx
import openai
import psutil
import pytest
import pytest_asyncio

from checker.systems.processes import is_running
from checker.systems.system import System
from orca.cli.small_model import small_model_folder
from support.waiting import until

# The system is started once, in the loop of its tests.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

WITHIN_S = 120.0  # a shared two-core machine; alone each wait takes a second
EVENTS_BEFORE_KILL = 12
STEP_MS = 10
"""An answer of 200 tokens takes 2 s at least, and the rank is frozen in its first tenth."""
TRIES = 10
"""Most answers that are begun: on a busy machine one may end before this process has frozen the rank."""
TOKENS = 200
LONG_ANSWER: dict[str, Any] = {
    "model": "austen",
    "input": "I have a long story to tell you.",
    "max_output_tokens": TOKENS,
    "temperature": 0,
}
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}For a function call write <tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>\
<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """The small model, with a chat template that knows tools, behind two gateways."""
    folder = tmp_path_factory.mktemp("clients")
    model = folder / "austen"
    model.mkdir()
    for file in small_model_folder("orca-austen").iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    # A frozen rank is to stay, and its epoch too.
    environment = {
        "ORCA_WORKER_DELAY_MS": str(STEP_MS),
        "ORCA_WORKER_RANK_SILENT_S": "3600",
        "ORCA_SCHEDULER_STEP_TIMEOUT_S": "3600",
    }
    async with System(folder / "up", ["--model", str(model), "--gateways", "2"], environment=environment) as system:
        yield system


@asynccontextmanager
async def clients(system: System) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """Open one client for each gateway, when both serve. A killed gateway starts again."""

    async def all_serve() -> bool:
        try:
            async with httpx.AsyncClient() as http:
                return all([(await http.get(f"{url}/ready")).status_code == 200 for url in system.urls])
        except httpx.HTTPError:
            return False

    await until(all_serve, WITHIN_S)
    opened = [openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in system.urls]
    try:
        yield opened
    finally:
        for client in opened:
            await client.close()


async def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await until(lambda: not is_running(process), WITHIN_S)


@contextmanager
def frozen_rank(system: System) -> Iterator[None]:
    """Freeze the rank: no answer gets another token."""
    rank = system.parts()["rank-0.0.0"]
    rank.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        rank.send_signal(signal.SIGCONT)


async def read_until_killed(stream: Any, process: psutil.Process, found: list[Any]) -> None:
    """Read the rest of a stream whose gateway is killed now. Args: found: takes the events that still come."""
    process.send_signal(signal.SIGKILL)
    with suppress(StopAsyncIteration, httpx.TransportError, openai.APIConnectionError):
        while True:
            found.append(await anext(stream))
    await until(lambda: not is_running(process), WITHIN_S)


async def half_a_stream(system: System, first: openai.AsyncOpenAI, second: openai.AsyncOpenAI, **fields: Any) -> Any:
    """Kill the gateway of a stream while the rank is frozen. Returns: the events that came, and the stream's rest.

    The rest is open at the other gateway before the rank goes on.
    """
    for _ in range(TRIES):
        stream = await first.responses.create(stream=True, **fields)
        before = [await anext(stream) for _ in range(EVENTS_BEFORE_KILL)]
        name = before[0].response.id
        with frozen_rank(system):
            if not await has_status(second, name, "in_progress"):
                await stream.close()
                continue
            await read_until_killed(stream, system.parts()["gateway"], before)
            last = before[-1].sequence_number
            return before, await second.responses.retrieve(name, stream=True, starting_after=last)
    pytest.fail(f"{TRIES} answers ended before the rank was frozen")


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
async def test_clients_go_on_at_the_other_gateway(system: System, background: bool) -> None:
    async with clients(system) as (first, second):
        before, resumed = await half_a_stream(system, first, second, background=background, **LONG_ANSWER)
        name = before[0].response.id
        events = [*before, *[event async for event in resumed]]
        again = await second.responses.retrieve(name, stream=True)
        undisturbed = [event async for event in again]
        final = await second.responses.retrieve(name)
    assert EVENTS_BEFORE_KILL <= len(before) < len(events)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.to_dict() for event in events] == [event.to_dict() for event in undisturbed]
    assert events[-1].response.to_dict() == final.to_dict()
    assert final.usage is not None
    assert final.usage.output_tokens == TOKENS


async def test_clients_poll_a_background_response_after_a_kill(system: System) -> None:
    async with clients(system) as (first, second):
        with frozen_rank(system):
            created = await first.responses.create(background=True, **LONG_ANSWER)
            assert created.status == "queued"
            await until(lambda: has_status(second, created.id, "in_progress"), WITHIN_S)
            await kill(system.parts()["gateway"])
        await until(lambda: has_status(second, created.id, "incomplete"), WITHIN_S)
        polled = await second.responses.retrieve(created.id)
        undisturbed = await second.responses.create(**LONG_ANSWER)
    assert polled.output_text == undisturbed.output_text
    assert polled.usage == undisturbed.usage


async def has_status(client: openai.AsyncOpenAI, name: str, *statuses: str) -> bool:
    return (await client.responses.retrieve(name)).status in statuses


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_agents_are_clients_of_chats_and_responses(system: System, is_streamed: bool) -> None:
    """Two turns: the tool is forced in the first, and the model writes a text in the second."""
    async with clients(system) as opened:
        chat = await run_agent(agents.OpenAIChatCompletionsModel("austen", opened[0]), is_streamed)
        responses = await run_agent(agents.OpenAIResponsesModel("austen", opened[1]), is_streamed)
    assert chat == responses


async def run_agent(model: agents.Model, is_streamed: bool) -> list[str]:
    """Run an agent to its end. Returns: the cities that its tool was called with, and its last words."""
    seen: list[str] = []

    @agents.function_tool
    def weather(city: Literal["Bath", "Lyme"]) -> str:
        """Tell the weather."""
        seen.append(city)
        return f"It rains in {city}."

    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=150)
    agent = agents.Agent(name="guide", model=model, model_settings=settings, tools=[weather])
    config = agents.RunConfig(tracing_disabled=True)
    result: agents.RunResult | agents.RunResultStreaming
    if is_streamed:
        result = agents.Runner.run_streamed(agent, "Is it fine?", max_turns=2, run_config=config)
        kinds = {event.type async for event in result.stream_events()}
        assert kinds >= {"raw_response_event", "run_item_stream_event"}
    else:
        result = await agents.Runner.run(agent, "Is it fine?", max_turns=2, run_config=config)
    assert [item.type for item in result.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]
    assert len(seen) == 1
    assert isinstance(result.final_output, str)
    assert result.final_output
    return [*seen, result.final_output]
