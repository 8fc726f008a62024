"""What a person sees of `orca up`: progress of the start, the finished system, examples to paste, and what goes wrong.

On a terminal the start is a bar per process; elsewhere it is a line whenever a process reaches another phase.
"""

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from orca.cli.up.readiness import STARTING, Standing
from orca.cli.up.supervisor import Supervised
from orca.core.process.settings import is_loopback


class Display:
    def __init__(self, console: Console) -> None:
        self._console = console

    def tell(self, text: str) -> None:
        """Print a sentence as it is."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def report(self, text: str) -> None:
        """Print what has just happened, behind its time as in the logs: UTC, RFC 3339, in milliseconds."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self.tell(f"{at} {text}")

    def progress(self, names: Sequence[str]) -> "StartProgress":
        """Context in which the start of the named processes is shown."""
        return StartProgress(self._console, names)

    def show_system(self, title: str, children: Sequence[Supervised], notes: Sequence[str]) -> None:
        """What runs and where, a line per process, and below it what else there is to know."""
        lines = [title, "", f"  {'process':<12} {'pid':>8}  address"]
        lines += [f"  {child.spec.name:<12} {child.pid or '-':>8}  {child.spec.address}" for child in children]
        self.tell("\n".join([*lines, "", *(f"  {note}" for note in notes)]))


class StartProgress:
    """Shows standings as they change."""

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

    def show(self, name: str, standing: Standing) -> None:
        self._bars.update(self._tasks[name], completed=standing.permille, description=escape(standing.text))
        if not self._console.is_terminal and self._last.get(name) != standing.phase:
            self._console.print(f"{name}: {standing.text}", markup=False, highlight=False, soft_wrap=True)
            self._last[name] = standing.phase


def access_note(host: str, keys: int, keys_file: str | None = None) -> str:
    """Who may call the API: one line, a warning when that is anybody in reach."""
    if keys_file is not None:
        return f"api:  the keys of {keys_file}; a call must show one"
    if keys:
        return f"api:  {keys} {'key' if keys == 1 else 'keys'}; a call must show one"
    if is_loopback(host):
        return "api:  open, to this machine only"
    return f"api:  WARNING: open to all who can reach {host}; --api-keys-file or --api-keys closes it"


def interpreter() -> str:
    """The Python that runs this, which has the client of the example, as a shell in this folder calls it."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return shlex.quote(str(python) if len(python.parts) > 1 else f"./{python}")


def examples(url: str, model: str, *, has_keys: bool) -> str:
    """A curl and a Python call that work as they stand, once ORCA_API_KEY is set where the API asks for keys."""
    body = f'{{"model": "{model}", "prompt": "It was a fine morning, and", "max_tokens": 40, "temperature": 0.7}}'
    intro, header, key, imports = "Try it:", "", '"none"', ""
    if has_keys:
        intro = "Try it, with one of the keys in the variable ORCA_API_KEY (export ORCA_API_KEY=...):"
        header = ' -H "Authorization: Bearer $ORCA_API_KEY"'
        key = 'os.environ["ORCA_API_KEY"]'
        imports = "import os\n\n"
    return f"""
{intro}

curl {url}/v1/completions{header} -H 'Content-Type: application/json' -d {shlex.quote(body)}

{interpreter()} - <<'EOF'
{imports}from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key={key})
question = [{{"role": "user", "content": "What is your opinion of Mr. Darcy?"}}]
answer = client.chat.completions.create(model="{model}", messages=question, max_tokens=60, temperature=0.7, stream=True)
for part in answer:
    print(part.choices[0].delta.content or "", end="", flush=True)
print()
EOF
"""
