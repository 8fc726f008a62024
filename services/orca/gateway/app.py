"""The gateway as an ASGI application: its paths, their access rules, and the mapping of errors.

generation.py has the life of a call. This module has the thin routes around it and the tasks of the process.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.params import Depends as Dependency
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from orca.core.domain.errors import OrcaError, PoolUnavailable
from orca.core.process.wall_clock import wall_clock_ms
from orca.gateway.answer.log_watcher import LogWatcher
from orca.gateway.answer.readers import Readers
from orca.gateway.answer.tracing import Tracing
from orca.gateway.calls.opened_call import OpenedCall, open_call, open_generation
from orca.gateway.errors import ApiError, api_error, error_response
from orca.gateway.gateway import Gateway
from orca.gateway.http.behind_proxy import ProxyPause
from orca.gateway.http.cors import Cors, CorsRules
from orca.gateway.http.receive import BodyBudget, UnreadBody
from orca.gateway.limits.auth import check_access, key_check
from orca.gateway.limits.key_ring import KeyRing
from orca.gateway.limits.middleware import HeadAsGet, HttpMetrics, RateLimitHeaders
from orca.gateway.limits.overload import Overload
from orca.gateway.metrics import GatewayMetrics
from orca.gateway.models.models import Models
from orca.gateway.routes import about, chat_page, generation, openapi, requests, responses
from orca.gateway.routes.early_refusal import EarlyRefusal
from orca.gateway.settings import GatewaySettings
from orca.pool.api import RequestPool

log = logging.getLogger(__name__)

METRICS_PORT = "is_metrics_port"
"""Key in the state of calls that came in by the separate port for metrics."""

SETTLE_SECONDS = 1.0
"""Longest time for the pool to remove the readers of a gateway that ends."""


def create_app(
    pool: RequestPool,
    models: Models,
    settings: GatewaySettings,
    clock_ms: Callable[[], int] = wall_clock_ms,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Create the application of one gateway process. Its lifespan runs the tasks of the process.

    Args:
        pool: stays open when the application ends.
        clock_ms: wall clock in Unix milliseconds, for `created`.
        tracing: None reads the environment.
    Raises: SettingError for keys that cannot be used or are missing.
    """
    keys = KeyRing(settings)
    check_access(settings, keys)
    if settings.prefix_sharing == "key" and keys.is_open:
        log.warning("there are no API keys, so all calls share prefixes: --prefix-sharing key has no effect")
    gateway = Gateway(
        pool=pool,
        models=models,
        settings=settings,
        clock_ms=clock_ms,
        metrics=GatewayMetrics(models.newest.info.name, settings.metric_names),
        tracing=tracing or Tracing.from_environment(),
        watcher=LogWatcher(pool),
        readers=Readers(pool, settings.round_seconds, lease_s=pool.reader_lease_s),
        keys=keys,
        overload=Overload(pool, time.monotonic, settings.connections_max, models.update),
        body_budget=BodyBudget(settings.bodies_bytes_max),
    )
    app = FastAPI(title="Orca", lifespan=_lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.gateway = gateway
    # Routes are tried in this order: the busiest first. All belong to the application itself: an included router would
    # match its routes twice.
    _add_working_routes(app, key_check(keys, makes_work=True))
    _add_open_routes(app)
    _add_reading_routes(app, Depends(key_check(keys, makes_work=False)))
    app.add_middleware(EarlyRefusal, gateway=gateway, paths=generation.PATHS)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RateLimitHeaders, keys=keys)
    rules = CorsRules(settings.cors_origins)
    if not rules.are_off:
        app.add_middleware(Cors, rules=rules)
    app.add_middleware(HttpMetrics, metrics=gateway.metrics)
    app.add_middleware(ProxyPause, pause_s=gateway.settings.proxy_pause_seconds)
    _map_errors(app, rules)
    app.openapi = functools.partial(openapi.write_document, app)  # type: ignore[method-assign]
    return app


_Serve = Callable[[Gateway, OpenedCall, UnreadBody], Awaitable[Response]]
"""Serves a call that generates."""


class _Direct(APIRoute):
    """A route whose function takes the request and returns the response. FastAPI only adds it to the document.

    FastAPI's own work for a route (dependencies, body, conversion of the result) was a twelfth of a gateway's CPU time
    for a call of one token.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


def _add_working_routes(app: FastAPI, check: Callable[[Request], Awaitable[None]]) -> None:
    """Add routes that need a key, if there are keys, and count against its limits."""
    post = functools.partial(app.post, dependencies=[Depends(check)])
    add_direct = functools.partial(app.router.add_api_route, methods=["POST"], route_class_override=_Direct)

    def generates(path: str, name: str, serve: _Serve, document: dict[str, Any]) -> None:
        async def answer(request: Request) -> Response:
            await check(request)
            gateway = _gateway(request)
            call = await open_generation(gateway, request)
            return await serve(gateway, call, UnreadBody.of(request))

        add_direct(path, answer, name=name, **document)

    generates(generation.COMPLETIONS, "completions", generation.complete, openapi.COMPLETIONS)
    generates(generation.CHAT, "chat_completions", generation.chat, openapi.CHAT_COMPLETIONS)
    generates(generation.RESPONSES, "create_response", responses.create, openapi.RESPONSES)

    @post("/tokenize", **openapi.TOKENIZE)
    async def tokenize(request: Request) -> dict[str, Any]:
        return await about.tokenize(_gateway(request), UnreadBody.of(request))

    @post("/detokenize", **openapi.DETOKENIZE)
    async def detokenize(request: Request) -> dict[str, Any]:
        return await about.detokenize(_gateway(request), UnreadBody.of(request))


def _add_reading_routes(app: FastAPI, has_key: Dependency) -> None:
    """Add routes that need a key, if there are keys, and only read, cancel or delete."""
    get = functools.partial(app.get, dependencies=[has_key])
    delete = functools.partial(app.delete, dependencies=[has_key])
    post = functools.partial(app.post, dependencies=[has_key])

    @get("/v1/requests/{request_id}", **openapi.REQUEST_STATE)
    async def request_state(request: Request, request_id: str) -> Response:
        """The state of a call, its text so far, and the URLs of its answer."""
        return await requests.state(_gateway(request), open_call(request), request_id)

    @delete("/v1/requests/{request_id}", **openapi.REQUEST_STATE)
    async def cancel_request(request: Request, request_id: str) -> Response:
        """End a call, unless it has ended. The answer is its state."""
        return await requests.cancel(_gateway(request), open_call(request), request_id)

    @get("/v1/requests/{request_id}/result", **openapi.REQUEST_RESULT)
    async def request_result(request: Request, request_id: str) -> Response:
        """The whole answer of a call that has ended; until then 202 and its state."""
        return await requests.result(_gateway(request), open_call(request), request_id)

    @get("/v1/requests/{request_id}/events", **openapi.REQUEST_EVENTS)
    async def request_events(request: Request, request_id: str) -> Response:
        """The stream of a call, with event ids, after the events that the client has.

        `Last-Event-ID`, or `starting_after` in the query, names the last event of each choice: `0.12,1.end`.
        """
        return await requests.events(_gateway(request), open_call(request), request_id)

    @get("/v1/responses/{response_id}", **openapi.RETRIEVED_RESPONSE)
    async def retrieve_response(request: Request, response_id: str) -> Response:
        """A response as it is now. With `stream=true`, its events, after number `starting_after`."""
        return await responses.retrieve(_gateway(request), open_call(request), request, response_id)

    @get("/v1/responses/{response_id}/input_items", **openapi.INPUT_ITEMS)
    async def input_items(request: Request, response_id: str) -> Response:
        """The items from which a response was made, with those of the responses that it continued."""
        return await responses.input_items(_gateway(request), open_call(request), request, response_id)

    @delete("/v1/responses/{response_id}", **openapi.DELETED_RESPONSE)
    async def delete_response(request: Request, response_id: str) -> Response:
        """End a response, unless it has ended, and delete it with all that is stored of it."""
        return await responses.delete(_gateway(request), open_call(request), response_id)

    @post("/v1/responses/{response_id}/cancel", **openapi.RESPONSE)
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End a response, unless it has ended."""
        return await responses.cancel(_gateway(request), open_call(request), response_id)

    @get("/v1/models", **openapi.MODELS)
    async def models(request: Request) -> dict[str, Any]:
        return about.models(_gateway(request))

    # A model's name may hold slashes.
    @get("/v1/models/{name:path}", **openapi.MODEL)
    async def model(request: Request, name: str) -> dict[str, Any]:
        return about.model(_gateway(request), name)


def _add_open_routes(app: FastAPI) -> None:
    """Add routes that need no key; auth.py gives the reasons."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return chat_page.chat_page()

    @app.get("/health", **openapi.HEALTH)
    async def health() -> dict[str, Any]:
        """The process answers. Pool and groups do not matter here, so that their outages do not restart gateways."""
        return {"status": "ok"}

    @app.get("/ready", **openapi.READY)
    async def ready(request: Request) -> Response:
        return await about.ready(_gateway(request))

    @app.get("/metrics", **openapi.METRICS)
    async def metrics(request: Request) -> Response:
        is_metrics_port = bool(request.scope.get("state", {}).get(METRICS_PORT))
        return await about.metrics(_gateway(request), is_metrics_port=is_metrics_port)


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    gateway: Gateway = app.state.gateway
    tasks = [
        asyncio.create_task(gateway.watcher.run(), name="log-watcher"),
        asyncio.create_task(gateway.readers.run(), name="readers"),
        asyncio.create_task(gateway.keys.run(), name="key-file"),
        asyncio.create_task(gateway.overload.lag.run(), name="loop-lag"),
        asyncio.create_task(_announce_model(gateway), name="announce-model"),
    ]
    try:
        yield
    finally:
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await gateway.readers.settle()
                await asyncio.gather(*gateway.finishing)
        except TimeoutError:
            log.warning("the pool does not answer: the leases of reader entries will end by themselves")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gateway.tracing.close()


async def _announce_model(gateway: Gateway) -> None:
    """Make this gateway's model current in a pool that has none, so that calls are accepted before a group forms.

    This ends when the pool has the length of the longest request, from the first group of a model of this gateway.
    """
    while not gateway.models.has_formed:
        try:
            # Generation 0 is below any generation of a rollout.
            await gateway.pool.set_revision(gateway.models.newest.info.revision, 0)
            await gateway.overload.backlog.counts(about.STATS_SECONDS)
        except PoolUnavailable:
            log.debug("the model cannot be announced yet: the pool does not answer")
        except Exception:
            log.exception("announcing the model failed")
        if not gateway.models.has_formed:
            await asyncio.sleep(gateway.settings.round_seconds)


def _map_errors(app: FastAPI, rules: CorsRules) -> None:
    """Answer every error in OpenAI's shape."""

    async def known_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def orca_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, OrcaError)
        return error_response(api_error(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == HTTPStatus.NOT_FOUND:
            message += "; /openapi.json lists the paths that this server has"
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        return error_response(ApiError(error.status_code, message, code=code), error.headers)

    async def client_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def bug(request: Request, _: Exception) -> Response:
        error = ApiError(500, "internal error", kind="server_error", code="internal_error")
        # Starlette answers it outside of all middleware.
        return error_response(error, rules.headers(request.headers.get("origin")))

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        ApiError: known_error,
        OrcaError: orca_error,
        HTTPException: http_error,
        ClientDisconnect: client_gone,
        Exception: bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
