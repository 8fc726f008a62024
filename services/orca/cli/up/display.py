"""Prints the output of `orca up`: the progress of the start, the running system, examples to paste, and errors.

On a terminal the start is a progress bar per process. Elsewhere it is a line whenever a process reaches a new phase.
What comes before it, if a plan is made, is one bar, or a line every few seconds.
"""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from orca.cli.up.readiness import STARTING, StartStatus
from orca.cli.up.supervisor import Supervised
from orca.core.process.settings import is_loopback

LINE_EVERY_S = 15.0
"""Least time between two lines of an activity where there is no terminal."""


class Display:
    """The output of `orca up` on one console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def print_text(self, text: str) -> None:
        """Print text without markup."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def report(self, text: str) -> None:
        """Print an event with its time in front, as in the logs: UTC, RFC 3339, milliseconds."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self.print_text(f"{at} {text}")

    def progress(self, names: Sequence[str]) -> "StartProgress":
        """Return a context manager that shows the start of the named processes."""
        return StartProgress(self._console, names)

    def activity(self, name: str, *, seconds: float | None = None) -> "ActivityProgress":
        """Return a context manager that shows a long activity of this process.

        Args: seconds: that it takes, about; None if that is not known.
        """
        return ActivityProgress(self._console, name, seconds)

    def show_system(self, title: str, children: Sequence[Supervised], notes: Sequence[str]) -> None:
        """Print a table of the running processes and their addresses, and the notes below it."""
        lines = [title, "", f"  {'process':<12} {'pid':>8}  address"]
        lines += [f"  {child.spec.name:<12} {child.pid or '-':>8}  {child.spec.address}" for child in children]
        self.print_text("\n".join([*lines, "", *(f"  {note}" for note in notes)]))


class StartProgress:
    """Shows the start status of each process as it changes."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._last: dict[str, str] = {}
        self._bars = Progress(
            TextColumn("{task.fields[name]:<12}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {
            name: self._bars.add_task(STARTING.text, total=1000, name=name) for name in names
        }

    def __enter__(self) -> "StartProgress":
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def show(self, name: str, status: StartStatus) -> None:
        self._bars.update(self._tasks[name], completed=status.permille, description=escape(status.text))
        if not self._console.is_terminal and self._last.get(name) != status.phase:
            self._console.print(f"{name}: {status.text}", markup=False, highlight=False, soft_wrap=True)
            self._last[name] = status.phase


class ActivityProgress:
    """Shows what an activity does now: beside a bar, or as lines."""

    def __init__(
        self, console: Console, name: str, seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._name, self._clock = console, name, clock
        self._begun_s, self._printed_s = clock(), -LINE_EVERY_S
        self._bars = Progress(
            TextColumn(f"{name:<12}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        # A bar without a total moves to and fro.
        self._task = self._bars.add_task("", total=seconds)

    def __enter__(self) -> "ActivityProgress":
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def show(self, text: str) -> None:
        elapsed_s = self._clock() - self._begun_s
        self._bars.update(self._task, completed=elapsed_s, description=escape(text.strip()))
        if not self._console.is_terminal and elapsed_s >= self._printed_s + LINE_EVERY_S:
            self._console.print(f"{self._name}: {text.strip()}", markup=False, highlight=False, soft_wrap=True)
            self._printed_s = elapsed_s


def access_note(host: str, keys: int, keys_file: str | None = None) -> str:
    """Return a line that says who may call the API, with a warning if everybody in reach may."""
    if keys_file is not None:
        return f"api:  each call needs one of the keys in {keys_file}"
    if keys:
        return f"api:  each call needs {'the key' if keys == 1 else f'one of {keys} keys'}"
    if is_loopback(host):
        return "api:  open, but only to this machine"
    return f"api:  WARNING: open to everybody who can reach {host}; set --api-keys-file or --api-keys to close it"


def interpreter() -> str:
    """Return the running Python, which has the example's client, as a shell in the current folder can call it."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return shlex.quote(str(python) if len(python.parts) > 1 else f"./{python}")


def examples(url: str, model: str, *, has_keys: bool, has_chats: bool, is_encoder_decoder: bool) -> str:
    """Return a curl and a Python call to paste. If the API needs keys, they read one from ORCA_API_KEY.

    Args:
        has_chats: the model has a chat template; without one, the Python call completes a prompt, too.
        is_encoder_decoder: the prompt is a source; the sampling is greedy.
    """
    # The source is text as the small encoder-decoder model reads it.
    prompt = "is mr darcy at home" if is_encoder_decoder else "It was a fine morning, and"
    temperature = 0 if is_encoder_decoder else 0.7
    body = f'{{"model": "{model}", "prompt": "{prompt}", "max_tokens": 40, "temperature": {temperature}}}'
    intro, header, key, imports = "Try it:", "", '"none"', ""
    if has_keys:
        intro = "Try it, after setting ORCA_API_KEY to one of the keys (export ORCA_API_KEY=...):"
        header = ' -H "Authorization: Bearer $ORCA_API_KEY"'
        key = 'os.environ["ORCA_API_KEY"]'
        imports = "import os\n\n"
    question, calls, given, text = "", "completions", f'prompt="{prompt}"', "text"
    if has_chats:
        question = 'question = [{"role": "user", "content": "What is your opinion of Mr. Darcy?"}]\n'
        calls, given, text = "chat.completions", "messages=question", 'delta.content or ""'
    given += f", max_tokens=60, temperature={temperature}"
    return f"""
{intro}

curl {url}/v1/completions{header} -H 'Content-Type: application/json' -d {shlex.quote(body)}

{interpreter()} - <<'EOF'
{imports}from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key={key})
{question}answer = client.{calls}.create(model="{model}", {given}, stream=True)
for part in answer:
    print(part.choices[0].{text}, end="", flush=True)
print()
EOF
"""
