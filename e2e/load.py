"""Streaming requests in the background of a scenario, each answer compared with the undisturbed run's.

Two kinds of clients, counted apart. The plain one is the `openai` client as people use it: it tries a call again that
was refused, and a stream that breaks is a failure. The resuming one keeps the id of the last event and reads on from
there, at whatever gateway it reaches.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
from openai import OpenAI

from installation import Service, wait_until

MODEL = "orca-austen"
PROMPTS = (
    "It was a fine morning, and",
    "Mr. Darcy looked at her, and",
    "She had never been to London, but",
    "The letter which lay on the table",
)
TOKENS = 120
CALL_S = 120.0
"""A call without an answer for so long has failed."""
QUIET_S = 35.0
"""A connection that is quiet for so long is dead: gateways say every 15 s that a stream waits."""


@dataclass
class Counts:
    """What became of the calls of one kind of client."""

    whole: int = 0
    open: set[int] = field(default_factory=set)  # clients in the middle of an answer
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    resumed: int = 0
    longest_pause_s: float = 0.0  # between two tokens of one answer

    def summary(self) -> dict[str, object]:
        return {
            "answers": self.whole,
            "failed": len(self.failed),
            "wrong": len(self.wrong),
            "resumed": self.resumed,
            "longest_pause_s": round(self.longest_pause_s, 1),
        }


class Load:
    """`with Load(service).running()`: so many clients of each kind, one call after the other."""

    def __init__(self, service: Service, *, plain: int = 2, resuming: int = 2) -> None:
        self._service = service
        self._key = service.api_key()
        self._plain, self._resuming = plain, resuming
        self._is_over = threading.Event()
        self.expected: dict[str, set[str]] = {prompt: set() for prompt in PROMPTS}
        self.plain = Counts()
        self.resuming = Counts()

    def learn(self) -> None:
        """The undisturbed answers of the model that is served now: greedy, so each prompt has one for each model."""
        for prompt in PROMPTS:
            self.expected[prompt].add(self._ask_plainly(prompt, Counts()))

    @contextlib.contextmanager
    def running(self) -> Iterator["Load"]:
        """Until the block ends and the last calls have their answers."""
        if not all(self.expected.values()):
            self.learn()
        self.plain, self.resuming = Counts(), Counts()
        self._is_over.clear()
        clients = [
            threading.Thread(target=self._go_on, args=(self._ask_plainly, self.plain)) for _ in range(self._plain)
        ]
        clients += [
            threading.Thread(target=self._go_on, args=(self._ask_resuming, self.resuming))
            for _ in range(self._resuming)
        ]
        for each in clients:
            each.start()
        try:
            self._wait_until(lambda: len(self.plain.open) == self._plain and len(self.resuming.open) == self._resuming)
            yield self
            plain, resuming = self.plain.whole, self.resuming.whole
            self._wait_until(lambda: self.plain.whole > plain and self.resuming.whole > resuming)
        finally:
            self._is_over.set()
            for each in clients:
                each.join()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """The change comes when every client is in the middle of an answer; it is judged when each kind has another."""
        wait_until(is_so, lambda: f"plain {self.plain}, resuming {self.resuming}", within_s=CALL_S)

    def summary(self) -> dict[str, object]:
        """What became of the calls of the last run, by kind of client."""
        return {"plain": self.plain.summary(), "resuming": self.resuming.summary()}

    def check(self) -> None:
        """No answer of either client is missing or another one."""
        self.check_resuming()
        assert not self.plain.failed, f"plain: {len(self.plain.failed)} failed, such as {self.plain.failed[0]}"

    def check_resuming(self) -> None:
        """As `check`, but the plain client may have been cut off."""
        for kind, counts in (("plain", self.plain), ("resuming", self.resuming)):
            assert not counts.wrong, f"{kind}: {len(counts.wrong)} wrong answers, such as {counts.wrong[0]}"
            assert counts.whole, f"{kind}: no answer at all"
        failed = self.resuming.failed
        assert not failed, f"resuming: {len(failed)} failed, such as {failed[0]}"

    def _go_on(self, ask, counts: Counts) -> None:  # type: ignore[no-untyped-def]
        for prompt in itertools.cycle(PROMPTS):
            if self._is_over.is_set():
                return
            try:
                text = ask(prompt, counts)
            except Exception as error:
                at = time.strftime("%H:%M:%S", time.gmtime())
                counts.failed.append(f"{at} {type(error).__name__}: {error} (from {error.__cause__!r})")
                continue
            finally:
                counts.open.discard(threading.get_ident())
            if text in self.expected[prompt]:
                counts.whole += 1
            else:
                counts.wrong.append(f"{text!r} for {self.expected[prompt]!r}")

    def _ask_plainly(self, prompt: str, counts: Counts) -> str:
        client = OpenAI(
            base_url=self._service.base_url,
            api_key=self._key,
            default_headers=self._service.headers,
            timeout=CALL_S,
        )
        last, parts = time.monotonic(), []
        with (
            client,
            client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True
            ) as stream,
        ):
            for event in stream:
                counts.open.add(threading.get_ident())
                counts.longest_pause_s = max(counts.longest_pause_s, time.monotonic() - last)
                last = time.monotonic()
                parts.append(event.choices[0].text)
                reason = event.choices[0].finish_reason
        assert reason == "length", f"it ended with {reason}"
        return "".join(parts)

    def _ask_resuming(self, prompt: str, counts: Counts) -> str:
        journey = _Journey(self._service, self._key, prompt)
        give_up = time.monotonic() + CALL_S
        while not journey.is_done:
            try:
                journey.listen(counts)
            except (httpx.HTTPError, _TryAgain):
                if time.monotonic() > give_up:
                    raise
                counts.resumed += journey.request_id is not None
                time.sleep(0.3)
        return "".join(journey.parts)


class _TryAgain(Exception):
    """The server said that it can't answer now, or the stream ended in the middle."""


class _Journey:
    """One answer, over as many connections as it takes."""

    def __init__(self, service: Service, key: str, prompt: str) -> None:
        self._service = service
        self._headers = {**service.headers, "Authorization": f"Bearer {key}"}
        self._key = f"e2e-{time.time_ns()}-{threading.get_ident()}"
        self._body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "on_disconnect": "keep",  # it comes back, however long that takes
        }
        self.request_id: str | None = None
        self._last_event: str | None = None
        self.parts: list[str] = []
        self.is_done = False

    def listen(self, counts: Counts) -> None:
        """One connection. Raises: httpx.HTTPError, _TryAgain."""
        last = time.monotonic()
        with httpx.Client(timeout=httpx.Timeout(10, read=QUIET_S)) as client, self._open(client) as response:
            if response.status_code in (429, 500, 502, 503, 504, 404):
                raise _TryAgain(f"{response.status_code}")
            response.raise_for_status()
            self.request_id = response.headers.get("x-request-id", self.request_id)
            for line in response.iter_lines():
                if line.startswith("id:"):
                    self._last_event = line.removeprefix("id:").strip()
                elif line.startswith("data:"):
                    counts.longest_pause_s = max(counts.longest_pause_s, time.monotonic() - last)
                    last = time.monotonic()
                    counts.open.add(threading.get_ident())
                    self._take(line.removeprefix("data:").strip())
        if not self.is_done:
            raise _TryAgain("the stream ended in the middle")

    def _open(self, client: httpx.Client):  # type: ignore[no-untyped-def]
        if self.request_id is None or self._last_event is None:
            headers = {**self._headers, "Idempotency-Key": self._key, "Accept": "text/event-stream"}
            self.parts.clear()
            return client.stream("POST", f"{self._service.base_url}/completions", json=self._body, headers=headers)
        headers = {**self._headers, "Last-Event-ID": self._last_event, "Accept": "text/event-stream"}
        return client.stream("GET", f"{self._service.base_url}/requests/{self.request_id}/events", headers=headers)

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise _TryAgain(event["error"]["message"])
        self.parts.append(event["choices"][0]["text"])
