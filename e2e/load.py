"""Streaming requests in the background of a scenario; each answer is compared with that of an undisturbed run.

There are two kinds of clients, with separate counts. The plain one is the usual `openai` client: it tries a refused
call again, and a broken stream is a failure. The resuming one stores the id of the last event and continues from there,
at any gateway.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
REASONS = ("length", "stop")
"""The ends of a whole answer: translations and the like end by themselves."""
CALL_S = 120.0
"""A call without an answer within this time has failed."""
QUIET_S = 35.0
"""A connection without data for this time is dead: gateways send a comment every 15 s while a stream waits."""


@dataclass
class CallCounts:
    """The results of the calls of one kind of client."""

    whole: int = 0
    open: set[int] = field(default_factory=set)  # clients in the middle of an answer
    begun: set[int] = field(default_factory=set)  # clients that have had a part of an answer
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    resumed: int = 0
    longest_pause_s: float = 0.0  # between two tokens of one answer

    def note_part(self) -> None:
        """The client of this thread has a part of an answer."""
        self.open.add(threading.get_ident())
        self.begun.add(threading.get_ident())

    def summary(self) -> dict[str, object]:
        return {
            "answers": self.whole,
            "failed": len(self.failed),
            "wrong": len(self.wrong),
            "resumed": self.resumed,
            "longest_pause_s": round(self.longest_pause_s, 1),
        }


class Load:
    """Clients of each kind, each with one call after the other: `with Load(service).running()`."""

    def __init__(
        self,
        service: Service,
        *,
        plain: int = 2,
        resuming: int = 2,
        prompts: Sequence[str] = PROMPTS,
        model: str = MODEL,
        tokens: int = TOKENS,
        takes_turns: bool = False,
    ) -> None:
        """
        Args:
            model: name in the calls, which may change between two runs.
            tokens: most tokens of an answer.
            takes_turns: the clients may never be all in the middle of an answer. Under rra, a request that missed an
                encode iteration waits for the next one, and short answers of others have ended by then.
        """
        self._service = service
        self._key = service.api_key()
        self.model = model
        self._tokens = tokens
        self._plain, self._resuming = plain, resuming
        self._takes_turns = takes_turns
        self._is_over = threading.Event()
        self.expected: dict[str, set[str]] = {prompt: set() for prompt in prompts}
        self.plain = CallCounts()
        self.resuming = CallCounts()

    def learn_answers(self) -> None:
        """Learn the undisturbed answers of the served model: with greedy decoding, each prompt has one per model."""
        for prompt in self.expected:
            self.expected[prompt].add(self._ask_plainly(prompt, CallCounts()))

    @contextlib.contextmanager
    def running(self) -> Iterator["Load"]:
        """Run the clients until the block ends and the last calls have their answers."""
        if not all(self.expected.values()):
            self.learn_answers()
        self.plain, self.resuming = CallCounts(), CallCounts()
        self._is_over.clear()
        clients = [
            threading.Thread(target=self._run_client, args=(self._ask_plainly, self.plain)) for _ in range(self._plain)
        ]
        clients += [
            threading.Thread(target=self._run_client, args=(self._ask_resuming, self.resuming))
            for _ in range(self._resuming)
        ]
        for each in clients:
            each.start()
        try:
            self._wait_until(self._is_under_way)
            yield self
            plain, resuming = self.plain.whole, self.resuming.whole
            self._wait_until(lambda: self.plain.whole > plain and self.resuming.whole > resuming)
        finally:
            self._is_over.set()
            for each in clients:
                each.join()

    def _is_under_way(self) -> bool:
        """Is every client in the middle of an answer, or has it been, if they take turns?"""
        plain, resuming = (each.begun if self._takes_turns else each.open for each in (self.plain, self.resuming))
        return len(plain) == self._plain and len(resuming) == self._resuming

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait: before the change until the load is under way, after it until each kind has another answer."""
        wait_until(is_so, lambda: f"plain {self.plain}, resuming {self.resuming}", within_s=CALL_S)

    def summary(self) -> dict[str, object]:
        """Return the results of the last run, by kind of client."""
        return {"plain": self.plain.summary(), "resuming": self.resuming.summary()}

    def check(self) -> None:
        """Check that no answer of either kind of client is missing or wrong."""
        self.check_resuming()
        assert not self.plain.failed, f"plain: {len(self.plain.failed)} failed, such as {self.plain.failed[0]}"

    def check_resuming(self) -> None:
        """Check like `check`, except that calls of the plain client may have failed."""
        for kind, counts in (("plain", self.plain), ("resuming", self.resuming)):
            assert not counts.wrong, f"{kind}: {len(counts.wrong)} wrong answers, such as {counts.wrong[0]}"
            assert counts.whole, f"{kind}: no answer at all"
        failed = self.resuming.failed
        assert not failed, f"resuming: {len(failed)} failed, such as {failed[0]}"

    def _run_client(self, ask, counts: CallCounts) -> None:  # type: ignore[no-untyped-def]
        for prompt in itertools.cycle(self.expected):
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

    def _ask_plainly(self, prompt: str, counts: CallCounts) -> str:
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
                model=self.model, prompt=prompt, max_tokens=self._tokens, temperature=0, stream=True
            ) as stream,
        ):
            for event in stream:
                counts.note_part()
                counts.longest_pause_s = max(counts.longest_pause_s, time.monotonic() - last)
                last = time.monotonic()
                parts.append(event.choices[0].text)
                reason = event.choices[0].finish_reason
        assert reason in REASONS, f"it ended with {reason}"
        return "".join(parts)

    def _ask_resuming(self, prompt: str, counts: CallCounts) -> str:
        answer = _ResumingAnswer(self._service, self._key, self.model, prompt, self._tokens)
        give_up = time.monotonic() + CALL_S
        while not answer.is_done:
            try:
                answer.read(counts)
            except (httpx.HTTPError, _TemporaryError):
                if time.monotonic() > give_up:
                    raise
                counts.resumed += answer.request_id is not None
                time.sleep(0.3)
        return "".join(answer.parts)


def is_answering(load: Load) -> bool:
    """Does the Ingress lead to a gateway now? If so, learn the undisturbed answers."""
    try:
        load.learn_answers()
    except Exception:
        return False
    return True


class _TemporaryError(Exception):
    """The server cannot answer now, or the stream ended in the middle."""


class _ResumingAnswer:
    """One answer, over as many connections as necessary."""

    def __init__(self, service: Service, key: str, model: str, prompt: str, tokens: int) -> None:
        self._service = service
        self._headers = {**service.headers, "Authorization": f"Bearer {key}"}
        self._key = f"e2e-{time.time_ns()}-{threading.get_ident()}"
        self._body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "on_disconnect": "keep",  # it resumes, even after a long time
        }
        self.request_id: str | None = None
        self._last_event: str | None = None
        self.parts: list[str] = []
        self.is_done = False

    def read(self, counts: CallCounts) -> None:
        """Read the answer on one connection. Raises: httpx.HTTPError, _TemporaryError."""
        last = time.monotonic()
        with httpx.Client(timeout=httpx.Timeout(10, read=QUIET_S)) as client, self._open(client) as response:
            if response.status_code in (429, 500, 502, 503, 504, 404):
                raise _TemporaryError(f"{response.status_code}")
            response.raise_for_status()
            self.request_id = response.headers.get("x-request-id", self.request_id)
            for line in response.iter_lines():
                if line.startswith("id:"):
                    self._last_event = line.removeprefix("id:").strip()
                elif line.startswith("data:"):
                    counts.longest_pause_s = max(counts.longest_pause_s, time.monotonic() - last)
                    last = time.monotonic()
                    counts.note_part()
                    self._add(line.removeprefix("data:").strip())
        if not self.is_done:
            raise _TemporaryError("the stream ended in the middle")

    def _open(self, client: httpx.Client):  # type: ignore[no-untyped-def]
        if self.request_id is None or self._last_event is None:
            headers = {**self._headers, "Idempotency-Key": self._key, "Accept": "text/event-stream"}
            self.parts.clear()
            return client.stream("POST", f"{self._service.base_url}/completions", json=self._body, headers=headers)
        headers = {**self._headers, "Last-Event-ID": self._last_event, "Accept": "text/event-stream"}
        return client.stream("GET", f"{self._service.base_url}/requests/{self.request_id}/events", headers=headers)

    def _add(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise _TemporaryError(event["error"]["message"])
        self.parts.append(event["choices"][0]["text"])
