"""The gateway as an ASGI application: which paths there are, who may use them, and how errors leave it.

A call's life is in generation.py; here are the thin routes around it and the tasks of the process.
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
from orca.gateway.errors import ApiError, answer_to, response_to
from orca.gateway.gateway import Gateway
from orca.gateway.http.behind_proxy import BehindProxy
from orca.gateway.http.receive import Intake
from orca.gateway.limits.auth import check_access, key_check
from orca.gateway.limits.key_ring import KeyRing
from orca.gateway.limits.middleware import CountHttp, HeadAsGet, TellLimits
from orca.gateway.limits.overload import Overload
from orca.gateway.metrics import Metrics
from orca.gateway.models.models import Models
from orca.gateway.routes import about, generation, openapi, requests
from orca.gateway.routes.early_refusal import TurnAway
from orca.gateway.routes.playground import playground
from orca.gateway.settings import Settings
from orca.pool.api import RequestPool

log = logging.getLogger(__name__)

SETTLE_SECONDS = 1.0
"""For the pool to take out the readers of a gateway that ends."""


def create_app(
    pool: RequestPool,
    models: Models,
    settings: Settings,
    clock_ms: Callable[[], int] = wall_clock_ms,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The application of one gateway process. Its lifespan runs the watcher and the renewal of readers.

    Args:
        pool: stays open when the application ends.
        clock_ms: wall clock, Unix milliseconds: `created` and deadlines.
        tracing: None exports as the environment says.
    Raises: SettingError for keys that cannot be used or are missing.
    """
    keys = KeyRing(settings)
    check_access(settings, keys)
    gateway = Gateway(
        pool=pool,
        models=models,
        settings=settings,
        clock_ms=clock_ms,
        metrics=Metrics(models.newest.info.name),
        tracing=tracing or Tracing.from_environment(),
        watcher=LogWatcher(pool),
        readers=Readers(pool, settings.round_seconds, lease_s=pool.reader_lease_s),
        keys=keys,
        overload=Overload(pool, time.monotonic, settings.connections_max, models.note),
        intake=Intake(settings.bodies_bytes_max),
    )
    app = FastAPI(title="Orca", lifespan=_lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.gateway = gateway
    # Routes are tried in this order: the busiest first. Each is the application's own: routers that it includes
    # look for theirs twice.
    _add_working_routes(app, key_check(keys, makes_work=True))
    _add_open_routes(app)
    _add_reading_routes(app, Depends(key_check(keys, makes_work=False)))
    app.add_middleware(TurnAway, gateway=gateway, paths=generation.PATHS)
    app.add_middleware(HeadAsGet)
    app.add_middleware(TellLimits, keys=keys)
    app.add_middleware(CountHttp, metrics=gateway.metrics)
    app.add_middleware(BehindProxy, pause_s=gateway.settings.proxy_pause_seconds)
    _map_errors(app)
    app.openapi = functools.partial(openapi.write_document, app)  # type: ignore[method-assign]
    return app


class _Direct(APIRoute):
    """A route whose function takes the request and gives the response: FastAPI writes it down in the document and
    leaves the rest to it. To look for dependencies, a body and how to make a response of what is returned was a
    twelfth of a gateway's processor time for a call of one token."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


def _add_working_routes(app: FastAPI, check: Callable[[Request], Awaitable[None]]) -> None:
    """What needs a key, if there are any, and is work: it counts against the key's limits."""
    post = functools.partial(app.post, dependencies=[Depends(check)])
    add_direct = functools.partial(app.router.add_api_route, methods=["POST"], route_class_override=_Direct)

    async def completions(request: Request) -> Response:
        await check(request)
        return await generation.complete(_gateway(request), request)

    async def chat_completions(request: Request) -> Response:
        await check(request)
        return await generation.chat(_gateway(request), request)

    add_direct(generation.COMPLETIONS, completions, **openapi.COMPLETIONS)
    add_direct(generation.CHAT, chat_completions, **openapi.CHAT_COMPLETIONS)

    @post("/tokenize", **openapi.TOKENIZE)
    async def tokenize(request: Request) -> dict[str, Any]:
        return await about.tokenize(_gateway(request), request)

    @post("/detokenize", **openapi.DETOKENIZE)
    async def detokenize(request: Request) -> dict[str, Any]:
        return await about.detokenize(_gateway(request), request)


def _add_reading_routes(app: FastAPI, has_key: Dependency) -> None:
    """What needs a key, if there are any, and only reads, or ends what was begun."""
    get = functools.partial(app.get, dependencies=[has_key])
    delete = functools.partial(app.delete, dependencies=[has_key])

    @get("/v1/requests/{request_id}", **openapi.REQUEST_STATE)
    async def request_state(request: Request, request_id: str) -> Response:
        """Where a call stands, its text so far, and where its answer is to be had."""
        return await requests.state(_gateway(request), request, request_id)

    @delete("/v1/requests/{request_id}", **openapi.REQUEST_STATE)
    async def cancel_request(request: Request, request_id: str) -> Response:
        """End a call that has not ended; one that has stays as it is. Answers its state."""
        return await requests.cancel(_gateway(request), request, request_id)

    @get("/v1/requests/{request_id}/result", **openapi.REQUEST_RESULT)
    async def request_result(request: Request, request_id: str) -> Response:
        """The whole answer of a call that has ended; 202 and its state until then."""
        return await requests.result(_gateway(request), request, request_id)

    @get("/v1/requests/{request_id}/events", **openapi.REQUEST_EVENTS)
    async def request_events(request: Request, request_id: str) -> Response:
        """The stream of a call, with event ids, from behind the events that the client has.

        `Last-Event-ID`, or `starting_after` in the query, names the last event of each choice: `0.12,1.end`.
        """
        return await requests.events(_gateway(request), request, request_id)

    @get("/v1/models", **openapi.MODELS)
    async def models(request: Request) -> dict[str, Any]:
        return about.models(_gateway(request))

    # A model's name may hold slashes.
    @get("/v1/models/{name:path}", **openapi.MODEL)
    async def model(request: Request, name: str) -> dict[str, Any]:
        return about.model(_gateway(request), name)


def _add_open_routes(app: FastAPI) -> None:
    """What needs no key; auth.py says why."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return playground()

    @app.get("/health", **openapi.HEALTH)
    async def health() -> dict[str, Any]:
        """The process answers; says nothing about pool and groups, so that no outage of theirs restarts gateways."""
        return {"status": "ok"}

    @app.get("/ready", **openapi.READY)
    async def ready(request: Request) -> Response:
        return await about.ready(_gateway(request))

    @app.get("/metrics", **openapi.METRICS)
    async def metrics(request: Request) -> Response:
        return await about.metrics(_gateway(request), request)


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
        asyncio.create_task(_introduce(gateway), name="introduce"),
    ]
    try:
        yield
    finally:
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await gateway.readers.settle()
                await asyncio.gather(*gateway.finishing)
        except TimeoutError:
            log.warning("the pool does not answer: reader entries are left to lapse")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gateway.tracing.close()


async def _introduce(gateway: Gateway) -> None:
    """Put our model in force in a pool that has none, so that calls are accepted before a group is formed.

    Ends when the pool says how long a request the first group of a model of ours can hold.
    """
    while not gateway.models.has_formed:
        try:
            # Generation 0 is below whatever a rollout states.
            await gateway.pool.set_revision(gateway.models.newest.info.revision, 0)
            await gateway.overload.counts(about.STATS_SECONDS)
        except PoolUnavailable:
            log.debug("the pool does not know this gateway yet: away")
        except Exception:
            log.exception("stating the revision failed")
        if not gateway.models.has_formed:
            await asyncio.sleep(gateway.settings.round_seconds)


def _map_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's shape."""

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return response_to(error)

    async def orca_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, OrcaError)
        return response_to(answer_to(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == HTTPStatus.NOT_FOUND:
            message += "; /openapi.json lists the paths that this server has"
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        return response_to(ApiError(error.status_code, message, code=code), error.headers)

    async def client_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def bug(_: Request, __: Exception) -> Response:
        return response_to(ApiError(500, "internal error", kind="server_error", code="internal_error"))

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        ApiError: api_error,
        OrcaError: orca_error,
        HTTPException: http_error,
        ClientDisconnect: client_gone,
        Exception: bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
