"""The page of errors: every ApiError that the gateway's code makes, and the tree of our own errors."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orca.core.domain import errors as core_errors
from orca.gateway import errors as gateway_errors
from reference.tables import code, sentence, table

GATEWAY = Path(gateway_errors.__file__).parent

_HEAD = """# Errors

Errors have OpenAI's shape:

```json
{"error": {"message": "...", "type": "invalid_request_error", "param": "max_tokens", "code": "never_fits"}}
```

`param` names the field. `code` is a word for programs. Nothing of a refused call is kept. In a stream, an error is an
event, and `[DONE]` is never sent after it.

With 429 and 503, `Retry-After` says when to come back, and it grows with the backlog. With `x-should-retry: false`, the
official clients do not try again: somebody wanted this end, or a second try would fail as well.

"""


@dataclass(frozen=True, order=True)
class Made:
    """An ApiError as the code makes it."""

    status: int
    code: str
    type: str
    message: str
    is_final: bool


def page() -> str:
    made = sorted({error for path in GATEWAY.rglob("*.py") for error in _made_in(path)})
    rows: dict[tuple[int, str, str], list[str]] = {}
    for error in made:
        final = " No retry." if error.is_final else ""
        text = "Says what is wrong" if set(error.message) <= set(" .:") else sentence(error.message)
        text = text if text.endswith(".") else f"{text}."
        texts = rows.setdefault((error.status, error.type, error.code), [])
        if f"{text}{final}" not in texts:
            texts.append(f"{text}{final}")
    answers = [
        (str(status), f"{code(name)}\n{code(kind)}", "\n".join(texts)) for (status, kind, name), texts in rows.items()
    ]
    tree = (core_errors.__doc__ or "").partition("\n\n")[2].strip()
    return (
        _HEAD
        + "## Answers of the gateway\n\n`...` stands for a part of the message that depends on the call.\n\n"
        + table(["Status", "Code and type", "Message"], sorted(answers))
        + "## Errors in the code\n\nThese cross a boundary between services. The gateway maps them to answers.\n\n"
        + f"```text\n{tree}\n```\n"
    )


def _made_in(path: Path) -> Iterator[Made]:
    yield from _made_in_block(ast.parse(path.read_text()).body, {})


def _made_in_block(block: Sequence[ast.stmt], outer: Mapping[str, ast.expr]) -> Iterator[Made]:
    """Yield what a block makes. `outer`: the values that names have where it begins."""
    values = dict(outer)
    for statement in block:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            values[statement.targets[0].id] = statement.value
        for call in _calls(statement):
            if (error := _made(call, values)) is not None:
                yield error
        for inner in _blocks(statement):
            yield from _made_in_block(inner, values)


def _blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, ())
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of ApiError in a statement, without those in the blocks inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "ApiError":
            yield child
        yield from _calls(child)


def _made(call: ast.Call, values: Mapping[str, ast.expr]) -> Made | None:
    """Return what a call makes; None where status or code come from a variable."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    status, name = call.args[0], named.get("code")
    if not (isinstance(status, ast.Constant) and isinstance(name, ast.Constant)):
        return None
    message, kind, final = call.args[1], named.get("kind"), named.get("is_final")
    if isinstance(message, ast.Name):
        message = values.get(message.id, message)
    if isinstance(kind, ast.Name):
        words = getattr(gateway_errors, kind.id)
    else:
        words = kind.value if isinstance(kind, ast.Constant) else gateway_errors.INVALID
    is_final = isinstance(final, ast.Constant) and bool(final.value)
    return Made(int(str(status.value)), str(name.value), str(words), _template(message), is_final)


def _template(message: ast.expr) -> str:
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in message.values)
    return "..."
