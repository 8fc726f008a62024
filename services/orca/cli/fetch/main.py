"""`orca fetch`: download a model into a folder. A killed fetch can be resumed, and the folder appears only when whole.

`--listen` opens an internal port with `/health` and `/progress` (`bytes_done`, `bytes_total`, `problem`). The last line
on standard error has the reason of a failure as REASON: SENTENCE (core.fetch_report), or names a bad setting. Exit
codes: 0 the model is there, 1 trying again may help, 2 trying again cannot help.
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
from orca.cli.fetch.progress import ProgressCounter
from orca.cli.fetch.settings import FetchSettings, parse_settings
from orca.cli.fetch.source import Source
from orca.core.fetch_report import PROGRESS_PAGE, format_reason
from orca.core.process.internal_port import InternalPort
from orca.core.process.logs import Format, configure_logging

log = logging.getLogger("orca.fetch")

LOG_PERIOD_S = 10.0
"""Seconds between two log lines about progress."""


def main(argv: Sequence[str]) -> int:
    """Fetch one model. Returns: the exit code. Raises: SettingError for a bad setting."""
    settings = parse_settings(argv, os.environ)
    configure_logging("fetch", fmt=cast(Format, settings.log_format), level=settings.log_level.upper())
    # These libraries log every request, and each error twice.
    for name in ("httpx2", "huggingface_hub", "botocore"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        asyncio.run(_fetch(settings))
    except FetchError as error:
        logging.shutdown()  # so that this is the last line
        print(format_reason(error.reason, f"{settings.uri}: {error}"), file=sys.stderr)
        return error.exit_code
    return 0


async def _fetch(settings: FetchSettings) -> None:
    """Raises: FetchError."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end_now, number)
    progress = ProgressCounter()
    port = None if settings.listen is None else await InternalPort.open(settings.listen, {PROGRESS_PAGE: progress.page})
    log.info("fetch started", extra={"uri": settings.uri, "address": port.address if port else None})
    progress_log = asyncio.create_task(_log_progress(progress))
    try:
        into = Path(settings.into)
        is_new = await asyncio.to_thread(lambda: fetch(_source(settings), into, progress, tries=settings.tries))
        message = "the model is complete" if is_new else "the model was there already"
        log.info(message, extra={"folder": settings.into})
    finally:
        progress_log.cancel()
        if port is not None:
            port.close()


def _source(settings: FetchSettings) -> Source:
    """Return the source of the model, and import only the libraries of that source."""
    if settings.repository is not None:
        from orca.cli.fetch.hub import HubSource

        return HubSource(settings.repository, settings.revision)
    from orca.cli.fetch.bucket import BucketSource

    assert settings.object_folder is not None  # checked with the settings
    return BucketSource(*settings.object_folder)


async def _log_progress(progress: ProgressCounter) -> None:
    while True:
        await asyncio.sleep(LOG_PERIOD_S)
        figures = progress.figures
        log.info("fetching", extra={"bytes_done": figures.bytes_done, "bytes_total": figures.bytes_total})


def _end_now(number: int) -> NoReturn:
    """Exit at once: threads that wait for the network would delay an orderly end, and a kill loses nothing.

    The first process of a container does not end by a signal that it does not handle, so this is a handler.
    """
    print(f"ended by {signal.Signals(number).name}; the next start resumes from here", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
