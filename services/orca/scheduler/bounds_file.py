"""A file with the bounds of a batch, polled while the scheduler runs: `{"max_batch_size": 16}`.

Under the policy rra it may have the controls of the cycle too: `{"encode_batch": 8, "decode_steps": 16}`. A name that
is left out keeps the value of its setting, but for `max_batch_tokens`, which is off then.

Kubernetes replaces a changed ConfigMap by swapping a link, an editor by writing a new file, so the content is compared.
If the content is invalid, the bounds in force stay, and an error is logged.
"""

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any

import orjson

from orca.core.domain.errors import BadValue, SettingError
from orca.scheduler.loop import GroupScheduler
from orca.scheduler.policy.policy import BatchBounds
from orca.scheduler.settings import CYCLE_SETTINGS, BatchingSettings

log = logging.getLogger("orca.scheduler")

POLL_S = 1.0
FIELDS = frozenset({"max_batch_size", "max_batch_tokens", *CYCLE_SETTINGS})
REQUIRED = frozenset({"max_batch_size", "encode_batch", "decode_steps"})
"""Fields that cannot be null. Null switches the others off; a threshold has its default then."""


class BoundsFile:
    """Polls the file; `run` is one task of the process."""

    def __init__(self, path: Path, settings: BatchingSettings, *, stages: int) -> None:
        """Args: settings: the settings that the file does not hold; stages: those of the group.

        Raises: SettingError if the file is invalid: at the start there are no other bounds to keep.
        """
        self._path = path
        self._settings = settings
        self._stages = stages
        self._seen = self._content()
        self.bounds = self._read(self._seen)

    async def run(self, scheduler: GroupScheduler) -> None:
        """Pass changes on to the scheduler until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.poll(scheduler)

    def poll(self, scheduler: GroupScheduler) -> None:
        """Put the file's bounds in force if the file has changed."""
        try:
            content = self._content()
            if content == self._seen:
                return
            self._seen = content
            bounds = self._read(content)
            scheduler.set_batch_bounds(bounds)
        except SettingError as error:
            log.error("the changed file of bounds is invalid, so the old bounds stay in force: %s", error)
            return
        self.bounds = bounds
        controls = {} if bounds.cycle is None else dataclasses.asdict(bounds.cycle)
        log.info(
            "the bounds of the changed file are in force",
            extra={"max_batch_size": bounds.max_batch_size, "max_batch_tokens": bounds.max_batch_tokens} | controls,
        )

    def _content(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError as error:
            raise SettingError(f"setting bounds_file: {self._path}: {error.strerror}") from error

    def _read(self, content: bytes) -> BatchBounds:
        """Parse the content. The settings of the same names have the same rules. Raises: SettingError."""
        try:
            found = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise SettingError(f"setting bounds_file: {self._path} is not JSON: {error}") from error
        if not isinstance(found, dict) or set(found) - FIELDS:
            raise SettingError(f"setting bounds_file: {self._path} is not an object of {', '.join(sorted(FIELDS))}")
        for name, value in found.items():
            if not _is_number(value) and (value is not None or name in REQUIRED):
                raise SettingError(f"setting bounds_file: {self._path}: {name} is {value!r}, not a whole number")
        try:
            chosen = {field.name: getattr(self._settings, field.name) for field in dataclasses.fields(BatchingSettings)}
            settings = BatchingSettings(**chosen | {"max_batch_tokens": None} | found)
            settings.check_stages(self._stages)
            return settings.make_bounds()
        except BadValue as error:
            raise SettingError(f"setting bounds_file: {self._path}: {error.name} {error.complaint}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
