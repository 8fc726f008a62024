"""`orca fetch`: a model comes into a folder once, resumed after any kill, and is whole when the folder appears.

`--listen` opens an internal port: `/health`, and `/progress` with `bytes_done`, `bytes_total` and `problem`. The last
line on standard error tells why it failed, as REASON: SENTENCE (core.fetch_report), or which setting cannot be. Exit
codes: 0 the model is there, 1 try again, 2 it will never work.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, cast

from orca.cli.fetch.download import fetch
from orca.cli.fetch.errors import FetchError
from orca.cli.fetch.progress import Progress
from orca.cli.fetch.settings import Settings, parse_settings
from orca.cli.fetch.source import Source
from orca.core.fetch_report import PROGRESS_PAGE, format_reason
from orca.core.process.internal_port import InternalPort
from orca.core.process.logs import Format, configure_logging

log = logging.getLogger("orca.fetch")

TELL_S = 10.0
"""Between two lines of the log that say how far it is."""


def main(argv: Sequence[str]) -> int:
    """Fetch one model. Returns: the exit code. Raises: SettingError for a bad setting."""
    settings = parse_settings(argv, os.environ)
    configure_logging("fetch", fmt=cast(Format, settings.log_format), level=settings.log_level.upper())
    # It tells every request, and an error twice.
    for name in ("httpx2", "huggingface_hub", "botocore"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        asyncio.run(_fetch(settings))
    except FetchError as error:
        logging.shutdown()  # so that this is the last line
        print(format_reason(error.reason, f"{settings.uri}: {error}"), file=sys.stderr)
        return error.exit_code
    return 0


async def _fetch(settings: Settings) -> None:
    """Raises: FetchError."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end_now, number)
    progress = Progress()
    port = None if settings.listen is None else await InternalPort.open(settings.listen, {PROGRESS_PAGE: progress.page})
    log.info("fetch", extra={"uri": settings.uri, "address": port.address if port else None})
    teller = asyncio.create_task(_tell(progress))
    try:
        into = Path(settings.into)
        is_new = await asyncio.to_thread(lambda: fetch(_source(settings), into, progress, tries=settings.tries))
        log.info("the model is there" if is_new else "the model was there", extra={"folder": settings.into})
    finally:
        teller.cancel()
        if port is not None:
            port.close()


def _source(settings: Settings) -> Source:
    """Only the libraries of the place that is asked are loaded."""
    if settings.repository is not None:
        from orca.cli.fetch.hub import HubSource

        return HubSource(settings.repository, settings.revision)
    from orca.cli.fetch.bucket import BucketSource

    assert settings.object_folder is not None  # checked with the settings
    return BucketSource(*settings.object_folder)


async def _tell(progress: Progress) -> None:
    while True:
        await asyncio.sleep(TELL_S)
        figures = progress.figures
        log.info("fetching", extra={"bytes_done": figures.bytes_done, "bytes_total": figures.bytes_total})


def _end_now(number: int) -> NoReturn:
    """At once: threads that wait for the network would hold up an orderly end, and any kill is survived.

    As the first process of a container it would not end by a signal that it does not handle.
    """
    print(f"ended by {signal.Signals(number).name}; the next start goes on from here", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
