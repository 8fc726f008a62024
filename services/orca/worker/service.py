"""The entry point of a stage worker: settings, logging, signals, and the controller."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

import uvloop

from orca.core.domain.errors import EngineError, ModelError, SettingError
from orca.core.process.internal_port import InternalPort
from orca.core.process.logs import configure_logging
from orca.worker.controller.controller import Controller
from orca.worker.settings import WorkerSettings, check_machine, parse_settings

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one stage until SIGTERM or SIGINT; a second signal ends it at once.

    Args: argv: flags without the program's name; None: those of the process.
    Returns: the exit status: 0 after a signal, 2 for a setting or a model that can never be served, 1 for other
        failures and after a second signal.
    """
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv, os.environ)
        check_machine(settings)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging(
        f"worker-{settings.stage}",
        fmt=settings.log_format,  # type: ignore[arg-type]
        level=settings.log_level.upper(),
    )
    return uvloop.run(_serve(settings))


async def _serve(settings: WorkerSettings) -> int:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            log.warning("second signal, the worker exits at once")
            logging.shutdown()

            os._exit(1)
        log.info("signal, the worker stops")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    controller = Controller(settings)
    health: InternalPort | None = None
    try:
        if settings.health_listen is not None:
            health = await InternalPort.open(settings.health_listen)
            log.info("health served", extra={"address": health.address})
        await controller.start()
        await controller.run(stop)
    except ModelError as error:
        log.error("the model cannot be served: %s", error)
        return 2
    except (EngineError, OSError) as error:
        log.error("the stage cannot serve: %s", error)
        return 1
    finally:
        await controller.close()
        if health is not None:
            health.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
