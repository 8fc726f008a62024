"""Fixtures of the engine's tests: controllers with scripted ranks in this process, real stages in others."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from orca.bench.parts.stage_processes import Stages, engine_for
from orca.bench.parts.tiny_model import write_tiny_model
from orca.scheduler.engines.grpc_engine import GrpcEngine
from orca.worker.controller.controller import Controller
from orca.worker.settings import WorkerSettings
from support.worker.engine_builders import SCRIPTED_RANK
from support.worker.loops import run
from support.worker.seq2seq_chain import chain_folder, chain_model

__all__ = ["chain_folder", "chain_model", "run"]


@pytest.fixture
async def start_controllers() -> AsyncIterator[Callable[..., Awaitable[list[Controller]]]]:
    """Start controllers in this process, one per script, with scripted ranks; all end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*scripts: str, **settings: Any) -> list[Controller]:
            started = []
            for stage, script in enumerate(scripts):
                chosen = {"model": script, "stage": stage, "stages": len(scripts)} | settings
                controller = Controller(WorkerSettings(**chosen), SCRIPTED_RANK)
                stack.push_async_callback(controller.close)
                await controller.start()
                started.append(controller)
            return started

        yield start


@pytest.fixture
async def start_engine() -> AsyncIterator[Callable[..., GrpcEngine]]:
    """Engines over controllers' addresses; all are closed with the test."""
    async with contextlib.AsyncExitStack() as stack:

        def start(addresses: Sequence[str], **choices: Any) -> GrpcEngine:
            engine = engine_for(addresses, **choices)
            stack.push_async_callback(engine.close)
            return engine

        yield start


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama-type checkpoint of three layers."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def start_stages(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stages]]:
    """Real stages by shape and flags, started once and shared by all tests; a rank takes seconds to load torch."""
    running: dict[tuple[Any, ...], Stages] = {}

    def start(stages: int, tensor: int, *flags: str) -> Stages:
        key = (stages, tensor, flags)
        if key not in running:
            folder = tmp_path_factory.mktemp("logs")
            running[key] = Stages(tiny_model, stages=stages, tensor=tensor, log_folder=folder, flags=flags)
        return running[key]

    yield start
    for stages in running.values():
        stages.stop()
