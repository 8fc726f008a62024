"""Entry point of a gateway: settings, logging, model, pool and server."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import cast

import uvloop

from orca.core.domain.errors import ModelError, SettingError
from orca.core.process.logs import Format, configure_logging
from orca.gateway.app import create_app
from orca.gateway.models.models import Models, load_newest, load_others
from orca.gateway.server import allow_open_files, make_server, take_port
from orca.gateway.settings import GatewaySettings, parse_settings
from orca.pool.redis.pool import RedisPool
from orca.pool.settings import PoolSettings, parse_pool_settings

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT: the first lets open streams end, the second ends them.

    Args: argv: flags without the program's name; None for those of the process.
    Returns: exit status; 0 after a signal, 1 if the pool or the port for metrics cannot be used,
            2 for a bad setting, a port that is taken, or a model that can never be served.
    """
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv, os.environ)
        pool_settings = parse_pool_settings(os.environ)
        # Before anything else, so that no other process takes the port while the model is loaded.
        sockets = take_port(settings.host, settings.port)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging("gateway", fmt=cast(Format, settings.log_format), level=settings.log_level.upper())
    # The gateway's own log lines say more.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    allow_open_files(settings.connections_max)
    with contextlib.ExitStack() as stack:
        for listener in sockets:
            stack.enter_context(listener)
        return uvloop.run(_serve(settings, pool_settings, sockets))


async def _serve(settings: GatewaySettings, pool_settings: PoolSettings, sockets: list[socket.socket]) -> int:
    try:
        models = Models(load_newest(settings), load_others(settings))
        pool = RedisPool(settings.pool, settings.deployment, pool_settings)
        app = create_app(pool, models, settings)
    except (ModelError, SettingError, ValueError) as error:
        log.error("the gateway cannot serve: %s", error)
        return 2
    try:
        await pool.check_server_if_there()
        server = make_server(app, settings)
        await server.serve(sockets)
        return 0 if server.started else 1
    except (ModelError, SettingError) as error:
        log.error("the gateway cannot serve: %s", error)
        return 1
    finally:
        await pool.close()


if __name__ == "__main__":
    sys.exit(main())
