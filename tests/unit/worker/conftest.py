"""Fixtures of the worker's unit tests."""

from support.worker.loops import run

__all__ = ["run"]
