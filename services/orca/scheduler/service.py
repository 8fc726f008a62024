"""The entry of a scheduler process: settings, logging, model, pool, engine, and the loop until a signal."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import cast

import uvloop

from orca.core.domain.engine import Engine, EngineShape
from orca.core.domain.errors import EngineError, ModelError, SettingError
from orca.core.domain.model import ModelInfo, load_model_info
from orca.core.domain.refusal import ModelBounds, refusal_of
from orca.core.domain.request import Request
from orca.core.domain.step import Epoch
from orca.core.domain.text import OutputText, Tokenizer
from orca.core.process.internal_port import InternalPort
from orca.core.process.logs import Format, configure_logging
from orca.core.process.wall_clock import wall_clock_ms
from orca.core.transport.tls_files import TlsFiles
from orca.pool.api import ProcessClosed, RequestPool
from orca.pool.records import Caller
from orca.pool.redis.pool import RedisPool
from orca.pool.settings import PoolSettings, parse_pool_settings
from orca.scheduler.bounds_file import BoundsFile
from orca.scheduler.dependencies import Dependencies, LoopTimings
from orca.scheduler.engines.grpc_engine import GrpcEngine
from orca.scheduler.formation_watch import FormationWatch
from orca.scheduler.gc_pace import GcPace
from orca.scheduler.loop import GroupScheduler, flat_errors
from orca.scheduler.metrics import SchedulerMetrics
from orca.scheduler.observer import IterationLogFile, Observer, Observers
from orca.scheduler.order.claim_orders import ClaimOrders
from orca.scheduler.policy.finish import MakeStopStringMatcher
from orca.scheduler.settings import SchedulerSettings, parse_settings

log = logging.getLogger("orca.scheduler")


MakeEngine = Callable[[ModelInfo, SchedulerSettings], Engine]


def real_stages(model: ModelInfo, settings: SchedulerSettings) -> Engine:
    return RevisionCheckedEngine(model.revision, settings)


def main(argv: Sequence[str] | None = None, make_engine: MakeEngine = real_stages) -> int:
    """Schedule one group until SIGTERM or SIGINT: the first drains, the second ends at once.

    Args:
        argv: flags without the program's name; those of the process when None.
        make_engine: makes the engine whose master the scheduler is.
    Returns: exit status; 0 after a drain, 1 if the pool or the group cannot be used, 2 for a bad setting or a model
        that can never be served.
    """
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv, os.environ)
        pool_settings = parse_pool_settings(os.environ)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging(
        f"scheduler-{settings.group}", fmt=cast(Format, settings.log_format), level=settings.log_level.upper()
    )
    return uvloop.run(_serve(settings, pool_settings, make_engine))


async def _serve(settings: SchedulerSettings, pool_settings: PoolSettings, make_engine: MakeEngine) -> int:
    try:
        model = load_model_info(settings.model, dtype=settings.dtype, quantization=settings.quantization)
        tokenizer = Tokenizer.from_folder(settings.model)
        pool = RedisPool(settings.pool, settings.deployment, pool_settings)
    except (ModelError, ValueError) as error:
        log.error("the scheduler cannot serve: %s", error)
        return 2
    engine = make_engine(model, settings)
    status = 1
    try:
        await pool.check_server_if_there()
        await _schedule(settings, model, tokenizer, pool, engine)
        status = 0
    except* SettingError as errors:
        log.error("the scheduler cannot go on: %s", flat_errors(errors)[0])
        status = 2
    except* (ProcessClosed, OSError) as errors:
        log.error("the scheduler cannot go on: %s", flat_errors(errors)[0])
    except* asyncio.CancelledError:
        log.warning("ended at once, by a second signal")
    finally:
        await engine.close()
        await pool.close()
    return status


async def _schedule(
    settings: SchedulerSettings, model: ModelInfo, tokenizer: Tokenizer, pool: RequestPool, engine: Engine
) -> None:
    """Run the loop until a signal, with metrics and iteration log around it."""
    process = f"{settings.group}-{secrets.token_hex(6)}"
    has_prefix_cache = _has_prefix_cache(settings, model)
    metrics = SchedulerMetrics(
        settings.group,
        wall_ms=wall_clock_ms,
        model_name=settings.name or model.name,
        names=settings.metric_names,
        block_tokens=settings.block_tokens,
        dtype=settings.dtype,
        has_prefix_cache=has_prefix_cache,
    )
    watch, pace = FormationWatch(settings.unformed_s, time.monotonic), GcPace()
    observers: list[Observer] = [metrics, watch, pace]
    rules = settings.make_rules()
    orders = None if rules is None else ClaimOrders(rules)
    if orders is not None:
        observers.append(orders.times)
    with contextlib.ExitStack() as stack:
        if settings.iteration_log is not None:
            observers.append(stack.enter_context(IterationLogFile(Path(settings.iteration_log))))
        dependencies = Dependencies(
            pool=pool,
            engine=engine,
            policy=settings.make_policy(),
            caller=Caller(group=settings.group, process=process, revision=model.revision),
            calls=count(1),
            clock_ns=time.monotonic_ns,
            observer=Observers(observers),
            eos_token_ids=model.eos_token_ids,
            make_stop_string_matcher=stop_string_matchers(tokenizer),
            forces_last_token=model.encoder_decoder is not None and bool(model.encoder_decoder.forced_eos_token_ids),
            orders=orders,
            timings=LoopTimings(commit_s=settings.commit_interval_ms / 1000),
            refuse=refusals_of(model),
        )
        bounds_file = None
        if settings.bounds_file is not None:
            bounds_file = BoundsFile(Path(settings.bounds_file), settings, stages=len(settings.stages))
        options = settings.make_options(None if bounds_file is None else bounds_file.bounds)
        options = replace(options, is_encoder_decoder=model.encoder_decoder is not None, prefix_cache=has_prefix_cache)
        scheduler = GroupScheduler(dependencies, options)
        if bounds_file is not None:
            stack.callback(asyncio.create_task(bounds_file.run(scheduler)).cancel)
        metrics.watch(scheduler.load, unformed_s=watch.unformed_s, loop=asyncio.get_running_loop())
        for running in (watch.run(), pace.run()):
            stack.callback(asyncio.create_task(running).cancel)
        if settings.metrics_listen is not None:
            port = await InternalPort.open(
                settings.metrics_listen, {"/metrics": metrics.page, "/ready": watch.ready_page}
            )
            stack.callback(port.close)
            log.info("metrics", extra={"address": port.address})
        log.info(
            "scheduler of a group",
            extra={"group": settings.group, "scheduler": process, "revision": model.revision, "model": model.name}
            | {
                "policy": dependencies.policy.describe(options),
                "prefetch": settings.prefetch,
                "stages": settings.stages,
            },
        )
        await _run_until_signalled(scheduler)


async def _run_until_signalled(scheduler: GroupScheduler) -> None:
    running = asyncio.current_task()
    assert running is not None
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            log.info("draining")
            scheduler.stop()
        else:
            running.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    await scheduler.run()


def _has_prefix_cache(settings: SchedulerSettings, model: ModelInfo) -> bool:
    """Return whether requests begin with KV blocks of others. If they cannot, the log says why."""
    if settings.prefix_cache and (reason := settings.no_prefix_cache or model.no_prefix_cache) is not None:
        log.info("the prefix cache is off", extra={"reason": reason})
        return False
    return settings.prefix_cache


def refusals_of(model: ModelInfo) -> Callable[[Request], str | None]:
    """Return a function that gives the reason why no group of this model can run a request."""
    bounds = ModelBounds(
        vocab_size=model.vocab_size,
        positions=model.positions,
        eos_token_ids=model.eos_token_ids,
        encoder_decoder=model.encoder_decoder,
    )

    def refuse(request: Request) -> str | None:
        return refusal_of(request, bounds)

    return refuse


def stop_string_matchers(tokenizer: Tokenizer) -> MakeStopStringMatcher:
    """Make matchers from the code that writes the gateway's text, so that both find a stop string at the same token."""

    return partial(OutputText.of, tokenizer)


class RevisionCheckedEngine(GrpcEngine):
    """The engine of real stages, refusing stages of another model than the one whose requests this scheduler claims."""

    def __init__(self, revision: str, settings: SchedulerSettings) -> None:
        super().__init__(
            settings.stages,
            listen=settings.listen,
            slots=settings.slots,
            block_tokens=settings.block_tokens,
            prefetch=settings.prefetch,
            step_timeout_s=settings.step_timeout_s,
            join_timeout_s=settings.join_timeout_s,
            advertise=settings.advertise,
            certificates=TlsFiles.of(settings),
        )
        self._revision = revision

    async def form(self, epoch: Epoch) -> EngineShape:
        """Form as GrpcEngine does, if all stages hold the revision whose output this scheduler promises."""
        for status in await self.wait_loaded():
            if status.revision != self._revision:
                raise EngineError(f"stage {status.stage} holds revision {status.revision}, not {self._revision}")
        return await super().form(epoch)


if __name__ == "__main__":
    sys.exit(main())
