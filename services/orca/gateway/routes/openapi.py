"""The OpenAPI document: the parts that FastAPI cannot derive from routes that read bodies and headers themselves.

Each constant goes into the decorator of a route. Refusals before any route, such as broken HTTP or one connection too
many, belong to no operation: `REFUSED_BEFORE` describes them for all.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from orca.gateway.calls.bodies import ChatBody, CompletionBody, DetokenizeBody, ErrorBody, TokenizeBody
from orca.gateway.latency_goals import header_parameters
from orca.gateway.render.cursor import HEADER, QUERY
from orca.gateway.responses.bodies import ResponseBody
from orca.gateway.responses.conversation import PAGE_ITEMS, PAGE_ITEMS_MAX
from orca.gateway.routes import answer_schemas

REFUSED_BEFORE = (
    "Before any operation a connection may be answered 400 (not HTTP/1.1), 408 (headers too slow), 414 and 431 (URL or "
    "headers too large), 429 and 503 (too many connections), with errors of the same shape. HEAD is answered as GET."
)

BODIES: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody, ResponseBody, TokenizeBody, DetokenizeBody)

_ERRORS = {
    400: "A field, a header or the body is invalid; `param` names it.",
    401: "No valid API key.",
    404: "No such model or request.",
    408: "The body did not arrive in time.",
    409: "The request was cancelled before it could finish, or the response of its Idempotency-Key was deleted.",
    413: "The body is too large.",
    415: "The body is not JSON, or it is compressed.",
    422: "The Idempotency-Key was used for another call.",
    429: "The queue is full, or a limit of the key or address is reached; Retry-After says when to try again.",
    500: "The server failed; the message says whether to try again.",
    503: "The pool or the model is not available, or the gateway shuts down; Retry-After says when to try again.",
    504: "The request's deadline passed before it could finish.",
}
_EVERYWHERE = (401, 429, 500, 503)
_OF_BODIES = (400, 404, 408, 413, 415)


def _responses(model: type[BaseModel] | None, *errors: int, **more: Any) -> dict[str, Any]:
    """Args: model: schema of the 200 answer; None if that is not JSON."""
    found: dict[int, Any] = {} if model is None else {200: {"model": model}}
    for status in sorted(errors):
        found[status] = {"model": ErrorBody, "description": _ERRORS[status]}
    return {"responses": found, "response_model": None, **more}


def _extra(body: type[BaseModel] | None = None, *parameters: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {"parameters": list(parameters)}
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return extra


def _header(name: str, description: str, **schema: Any) -> dict[str, Any]:
    schema = {"type": "string", **schema}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def _query(name: str, description: str, **schema: Any) -> dict[str, Any]:
    return {**_header(name, description, **schema), "in": "query"}


_IDEMPOTENCY_KEY = _header(
    "Idempotency-Key",
    "Calls with the same key are one generation. 1 to 255 printable ASCII characters.",
    minLength=1,
    maxLength=255,
    pattern="^[ -~]+$",
)
_PREFER = _header("Prefer", "`respond-async` answers at once, as `background` does.")
_TRACEPARENT = _header("traceparent", "W3C trace context. A malformed one is ignored.")
_LAST_EVENT_ID = _header(HEADER, "The last event that the client has of each choice: `0.12,1.end`; or `end`.")
_STARTING_AFTER = {**_LAST_EVENT_ID, "name": QUERY, "in": "query"}

# Without a type: some tools apply the schema to the whole text, others to one event.
_EVENTS = (
    "Server-sent events: the `data` of each is a chunk in OpenAI's shape, an error that ends the stream, or `[DONE]`."
)
_STREAM = {"text/event-stream": {"schema": {"description": _EVENTS}}}
_ACCEPTED = {
    "model": answer_schemas.RequestDocument,
    "description": "The call goes on without its client; `Location` is the URL of its state.",
}


def _generation(answer: type[BaseModel], body: type[BaseModel]) -> dict[str, Any]:
    operation = _responses(answer, *_EVERYWHERE, *_OF_BODIES, 409, 422, 504)
    operation["responses"][200]["content"] = _STREAM
    operation["responses"][202] = _ACCEPTED
    return {**operation, "openapi_extra": _extra(body, _IDEMPOTENCY_KEY, _PREFER, _TRACEPARENT, *header_parameters())}


COMPLETIONS = _generation(answer_schemas.Completion, CompletionBody)
CHAT_COMPLETIONS = _generation(answer_schemas.ChatCompletion, ChatBody)
RESPONSES = _generation(answer_schemas.ResponseObject, ResponseBody)
del RESPONSES["responses"][202]
RESPONSE = _responses(answer_schemas.ResponseObject, *_EVERYWHERE, 400, 404)
RESPONSE["responses"][200]["content"] = _STREAM
RETRIEVED_RESPONSE = {
    **RESPONSE,
    "openapi_extra": _extra(
        None,
        _query("stream", "Send the events of the response.", enum=["true", "false"], default="false"),
        _query("starting_after", "The number of the last event that the client has.", type="integer", minimum=0),
    ),
}
INPUT_ITEMS = _responses(
    answer_schemas.ItemList,
    *_EVERYWHERE,
    400,
    404,
    openapi_extra=_extra(
        None,
        _query("limit", "Items of the page.", type="integer", minimum=1, maximum=PAGE_ITEMS_MAX, default=PAGE_ITEMS),
        _query("order", "By age.", enum=["asc", "desc"], default="desc"),
        _query("after", "The id of the item before the page."),
    ),
)
DELETED_RESPONSE = _responses(answer_schemas.DeletedResponse, *_EVERYWHERE, 404)
REQUEST_STATE = _responses(answer_schemas.RequestDocument, *_EVERYWHERE, 404)
REQUEST_RESULT = _responses(None, *_EVERYWHERE, 404, 409, 504)
REQUEST_RESULT["responses"] |= {
    200: {
        "description": "The answer that the call itself would have got.",
        "content": {
            "application/json": {
                "schema": {
                    "anyOf": [
                        {"$ref": "#/components/schemas/Completion"},
                        {"$ref": "#/components/schemas/ChatCompletion"},
                        {"$ref": "#/components/schemas/ResponseObject"},
                    ]
                }
            }
        },
    },
    202: {
        "model": answer_schemas.RequestDocument,
        "description": "The call has not ended; Retry-After says when to try again.",
    },
}
REQUEST_EVENTS = _responses(None, *_EVERYWHERE, 400, 404, openapi_extra=_extra(None, _LAST_EVENT_ID, _STARTING_AFTER))
REQUEST_EVENTS["responses"] |= {
    200: {"description": "The stream.", "content": _STREAM},
    204: {"description": "The position was `end`: there are no more events."},
}
MODELS = _responses(answer_schemas.ModelList, *_EVERYWHERE)
MODEL = _responses(answer_schemas.ModelCard, *_EVERYWHERE, 404)
TOKENIZE = _responses(answer_schemas.Tokens, *_EVERYWHERE, *_OF_BODIES, openapi_extra=_extra(TokenizeBody))
DETOKENIZE = _responses(answer_schemas.Text, *_EVERYWHERE, *_OF_BODIES, openapi_extra=_extra(DetokenizeBody))
HEALTH = _responses(answer_schemas.Health)
READY = _responses(answer_schemas.Ready)
READY["responses"][503] = {
    "model": answer_schemas.Ready,
    "description": "No group has formed yet, or the gateway shuts down.",
}
METRICS = _responses(None, 404)
METRICS["responses"][200] = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {}}}}


def write_document(app: FastAPI) -> dict[str, Any]:
    """Return the document, which is made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version="1", description=REFUSED_BEFORE, routes=app.routes)
        template = "#/components/schemas/{model}"
        _, schemas = models_json_schema([(body, "validation") for body in BODIES], ref_template=template)
        components = document["components"]
        components["schemas"].update(schemas["$defs"])
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for operations in document["paths"].values():
            for operation in operations.values():
                # FastAPI assumes 422 for a bad path. Here that is 404.
                if "HTTPValidationError" in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
                if "401" in operation["responses"]:
                    # {}: a server without keys needs none.
                    operation["security"] = [{"key": []}, {}]
        for name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
