"""The page of the HTTP API, from the OpenAPI document that a gateway serves."""

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from orca.cli.small_model import small_model_folder
from orca.gateway.app import create_app
from orca.gateway.models.models import Models, load_newest
from orca.gateway.settings import GatewaySettings
from orca.pool.memory.pool import MemoryPool
from reference.tables import code, sentence, table

Json = dict[str, Any]

_HEAD = """# HTTP API

OpenAI's API, and what a durable log makes possible besides. A gateway serves this document as `/openapi.json`. How to
resume, repeat and cancel a call is in [Resume and idempotency](../how-to/resume-and-idempotency.md). Errors are in
[Errors](errors.md).

- The key goes into `Authorization: Bearer KEY`.
- The header `x-request-id` of an answer is the id of the call.
- A call may leave the model out: there is one.
- Unknown fields are ignored, as other servers do. `best_of` above `n`, and constraints that only
  other servers have are refused by name.
- A whole number may be written with a point (`5.0`), except in a prompt of token ids. null means that a field is
  absent.
- Web pages of other origins need `--cors-origins`: [Call the API from a web page](../how-to/browsers.md).
- There are no embeddings and no images.

"""


def page() -> str:
    document = _document()
    schemas = document["components"]["schemas"]
    parts = [_HEAD, sentence(document["info"]["description"]) + "\n\n"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation(method.upper(), path, operation))
    parts.append("## Bodies\n\n")
    parts += [
        _schema(name, schemas[name]) for name in schemas if name.endswith("Body") and not name.startswith("Error")
    ]
    parts += [_schema(name, schemas[name]) for name in ("Message", "StreamOptions")]
    parts.append("## Answers\n\n")
    skipped = {"Message", "StreamOptions"}
    parts += [_schema(name, schemas[name]) for name in schemas if not name.endswith("Body") and name not in skipped]
    return "".join(parts)


class _Clock:
    """The pool's clock, which nobody asks here."""

    def wall_ms(self) -> int:
        return 0


def _document() -> Json:
    settings = GatewaySettings(model=str(small_model_folder()))
    app = create_app(MemoryPool(_Clock()), Models(load_newest(settings)), settings)
    return app.openapi()


def _operation(method: str, path: str, operation: Json) -> str:
    parts = [f"## {method} {path}\n\n"]
    if operation.get("description"):
        parts.append(operation["description"].strip() + "\n\n")
    body = operation.get("requestBody")
    if body is not None:
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        parts.append(f"Body: {_link(name)}.\n\n")
    parameters = [
        (code(each["name"]), each["in"], _parameter_type(each["schema"]), sentence(each.get("description", "")))
        for each in operation.get("parameters", ())
    ]
    if parameters:
        parts.append(table(["Parameter", "In", "Type", "Meaning"], parameters))
    answers = [(status, _answer(status, of)) for status, of in sorted(operation["responses"].items())]
    parts.append(table(["Status", "Meaning"], answers))
    return "".join(parts)


def _answer(status: str, of: Json) -> str:
    schema = of.get("content", {}).get("application/json", {}).get("schema", {})
    names = [name for name in _references(schema) if name != "ErrorBody"]
    text = of["description"] if of["description"] != "Successful Response" else HTTPStatus(int(status)).phrase
    return sentence(text) + (f": {', '.join(map(_link, names))}" if names else "")


def _schema(name: str, schema: Json) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (
            code(field),
            _type(of) + ("\nrequired" if field in required and "Body" in name else ""),
            sentence(of.get("description", "")),
        )
        for field, of in schema.get("properties", {}).items()
    ]
    text = f"{sentence(schema['description'])}\n\n" if schema.get("description") else ""
    return f"### {name}\n\n{text}" + (table(["Field", "Type", "Meaning"], rows) if rows else "")


def _parameter_type(of: Json) -> str:
    """Return the type of a parameter, with its default where it has one."""
    return _type(of) + (f"\ndefault {code(of['default'])}" if "default" in of else "")


def _type(of: Json) -> str:
    """Return the type of a field, and its range where it has one."""
    options = [each for each in of.get("anyOf", [of]) if each.get("type") != "null"]
    kinds = [_kind(each) for each in options]
    ranges = [text for each in options if (text := _range(each))]
    return " or ".join(dict.fromkeys(kinds)) + "".join(f"\n{text}" for text in dict.fromkeys(ranges))


def _kind(of: Json) -> str:
    if "$ref" in of:
        return _link(of["$ref"].rpartition("/")[2])
    if "const" in of or "enum" in of:
        return ", ".join(code(value) for value in of.get("enum", [of.get("const")]))
    if of.get("type") == "array":
        return f"list of {_type(of['items'])}" if of.get("items") else "list"
    return str(of.get("type", "any"))


def _range(of: Json) -> str:
    least, most = of.get("minimum", of.get("exclusiveMinimum")), of.get("maximum")
    if least is None and most is None:
        return ""
    if "exclusiveMinimum" in of:
        return f"above {least}" if most is None else f"above {least}, at most {most}"
    return f"at least {least}" if most is None else f"{least} to {most}"


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _link(name: str) -> str:
    return f"[{name}](#{re.sub(r'[^a-z0-9_-]', '', name.lower())})"
