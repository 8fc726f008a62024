"""Logs a line once in a process: a model's folder is read several times on the way to an answer."""

import functools
import logging


@functools.cache
def log_once(logger: str, level: int, line: str) -> None:
    """Log a line unless this process has logged it before. Args: logger: its name."""
    logging.getLogger(logger).log(level, "%s", line)
