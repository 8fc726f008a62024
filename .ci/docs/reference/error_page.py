"""The page of errors: every ApiError that the gateway's code makes, and the tree of our own errors."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orca.core.domain import errors as core_errors
from orca.gateway import errors as gateway_errors
from reference.tables import code, table

GATEWAY = Path(gateway_errors.__file__).parent

_HEAD = """# Errors

Errors have OpenAI's shape:

```json
{"error": {"message": "...", "type": "invalid_request_error", "param": "max_tokens", "code": "never_fits"}}
```

`param` names the field or header. If its value is wrong, the message begins with its name. `code` is a word for
programs. Nothing of a refused call is kept. In a stream, an error is an event, and `[DONE]` is never sent after it.

With 429 and 503, `Retry-After` says when to come back, and it grows with the backlog. *No retry* means that the answer
has `x-should-retry: false`. The official clients then do not try again: somebody wanted this end, or a second try would
fail as well.

"""

# Messages that the code takes from elsewhere, one for each code.
_EXAMPLES = {
    "invalid_cursor": "Last-Event-ID: 'x' is not an event id; examples are 0.12 and 0.end",
    "invalid_value": "temperature: must be at most 2, not 3",
    "queue_full": "the queue is full: at most 1000 requests may wait",
    "pool_full": "the pool is full: requests accepted earlier reserve its 1073741824 bytes",
    "revision_not_served": "the request is of revision bc077d0dbdcd04df, which this gateway does not serve",
}


@dataclass(frozen=True, order=True)
class Made:
    """An ApiError as the code makes it."""

    status: int
    code: str
    type: str
    message: str
    is_final: bool


# app.py makes these out of Starlette's own errors.
_OF_PATHS = (
    Made(
        404,
        "not_found",
        gateway_errors.INVALID,
        "...: Not Found; /openapi.json lists the paths that this server has",
        False,
    ),
    Made(405, "method_not_allowed", gateway_errors.INVALID, "...: Method Not Allowed", False),
)


def page() -> str:
    made = sorted({*_OF_PATHS, *(error for path in GATEWAY.rglob("*.py") for error in _made_in(path))})
    rows: dict[tuple[int, str, str, bool], list[str]] = {}
    for error in made:
        texts = rows.setdefault((error.status, error.type, error.code, error.is_final), [])
        if (text := _message(error)) not in texts:
            texts.append(text)
    answers = [
        (str(status), f"{code(name)}\n{code(kind)}", "\n".join(texts), "no" if is_final else "")
        for (status, kind, name, is_final), texts in rows.items()
    ]
    tree = (core_errors.__doc__ or "").partition("\n\n")[2].strip()
    return (
        _HEAD
        + "## Answers of the gateway\n\n`...` stands for a part of the message that depends on the call.\n\n"
        + table(["Status", "Code and type", "Message", "Retry"], sorted(answers))
        + "## Errors in the code\n\nThese cross a boundary between services. The gateway maps them to answers.\n\n"
        + f"```text\n{tree}\n```\n"
    )


def _message(error: Made) -> str:
    """Return a message as clients get it, or an example if the code takes it from elsewhere."""
    if set(error.message) <= set(" .:"):
        return f"such as: {_EXAMPLES[error.code]}" if error.code in _EXAMPLES else "says what is wrong"
    return " ".join(error.message.split())


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
