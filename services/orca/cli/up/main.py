"""`orca up`: run the whole system on this machine, each part as a process of its own.

settings.py          the options                      supervisor.py    starts, restarts and stops the processes
../model_folder.py   finds the model                  redis_child.py   runs Redis as one of them
layout.py            fills in unset options (pure)    readiness.py     polls how far the start has come
plan.py              settings -> processes (pure)     display.py       prints to the terminal
spec.py              one process as data              log_errors.py    reports errors from the log files
local_resources.py   data folder, free ports, GPUs    probe.py         finds processes that are frozen
health_checks.py     one health check of a process    recovery.py      reports when the system serves again
planned.py           a plan -> options                slo/             makes a plan for a latency bound
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from orca.cli.model_folder import find_model
from orca.cli.small_model import small_model_folder
from orca.cli.up import local_resources
from orca.cli.up.display import Display, access_note, examples
from orca.cli.up.layout import describe, describe_pace, with_layout
from orca.cli.up.log_errors import follow_errors
from orca.cli.up.plan import DEPLOYMENT, Addresses, RuntimeContext, ignored_variables, plan
from orca.cli.up.planned import given_options, load_plan
from orca.cli.up.probe import Probe
from orca.cli.up.readiness import wait_until_ready
from orca.cli.up.recovery import Recovery
from orca.cli.up.redis_child import RedisChild
from orca.cli.up.settings import UpSettings, parse_settings
from orca.cli.up.spec import ProcessSpec, Role
from orca.cli.up.supervisor import Child, Supervised, Supervisor, SystemFailed
from orca.core.domain.errors import PoolUnavailable, SettingError
from orca.core.domain.model import ModelInfo, count_parameters, load_model_info
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, least_slots
from orca.core.process.settings import check_variables
from orca.gateway.limits.key_ring import KeyRing
from orca.gateway.settings import PREFIX as GATEWAY_PREFIX
from orca.gateway.settings import GatewaySettings
from orca.pool.settings import parse_pool_settings
from orca.scheduler.settings import PREFIX as SCHEDULER_PREFIX
from orca.scheduler.settings import SchedulerSettings
from orca.worker.machine import available_processors
from orca.worker.models.config import load_config
from orca.worker.parallel.stage_layers import read_layers
from orca.worker.settings import PREFIX as WORKER_PREFIX
from orca.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from orca.cli.up.slo.start import Begun, PlanOrder, PoolAccess

_PARTS = ((GatewaySettings, GATEWAY_PREFIX), (SchedulerSettings, SCHEDULER_PREFIX), (WorkerSettings, WORKER_PREFIX))


def main(argv: Sequence[str]) -> int:
    """Run the system until SIGINT, SIGTERM or SIGHUP.

    Returns: 0 after such a signal, 1 when a part cannot be kept running, 2 when a part refuses its settings.
    Raises: SettingError, ModelError before anything has started.
    """
    settings = parse_settings(argv)
    _check_parts(settings)
    folder, name = find_model(str(small_model_folder()) if settings.model is None else settings.model)
    model = load_model_info(
        folder,
        name=settings.served_name or name,
        dtype=settings.dtype,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
    )
    _check_tokenizer(model.folder)
    other_machine = None if settings.plan is None else _check_plan(settings.plan, model)
    _check_parallelism(settings, model)
    _check_slots(settings, model)
    gpus = local_resources.visible_gpus() if settings.device == "cuda" else ()
    if settings.device == "cuda" and len(gpus) < settings.tensor:
        raise SettingError(f"--device cuda --tensor {settings.tensor}: {len(gpus)} NVIDIA devices are visible")
    if settings.iteration_log is not None:
        local_resources.make_folder(Path(settings.iteration_log), "--iteration-log")
    if settings.redis_url is not None:
        asyncio.run(_check_redis(settings.redis_url))
    display = Display(Console(highlight=False))
    if other_machine is not None:
        display.print_text(
            f"plan: WARNING: it was made on another machine, so its figures may not hold: {other_machine}"
        )
    order = None if settings.slo_latency_ms is None else _read_order(settings, argv, model, len(gpus))
    data_folder = Path(settings.data) if settings.data else local_resources.default_data_folder(settings.port)
    with local_resources.DataFolder(data_folder, remedy="--data" if settings.data else "--port or --data") as data:
        addresses = Addresses.find(settings)
        redis: RedisChild | None = None
        follow: _Follow | None = None
        parameters, processors = count_parameters(folder), available_processors()
        choose = partial(with_layout, parameters=parameters, processors=processors)
        if order is not None:
            redis = _start_redis(settings, data)
            begun = _with_plan(order, redis, data, display)
            settings = begun.settings
            addresses = Addresses.find(settings)
            follow = _follow_of(order, begun, redis, argv, choose, data.folder)
        layout = describe(settings, parameters=parameters, processors=processors)
        settings = choose(settings)
        display.print_text(f"layout: {layout}; {describe_pace(settings)}")
        data.sign(f"http://{addresses.reached[0]}")
        redis = redis or _start_redis(settings, data)
        try:
            return asyncio.run(_serve(settings, model, data, redis, addresses, gpus, display, follow))
        except SystemFailed as failure:
            display.print_text(f"orca up: {failure}")
            return failure.exit_code


def _start_redis(settings: UpSettings, data: local_resources.DataFolder) -> RedisChild | None:
    """Start Redis, unless the user has one."""
    # Redis may load its data for a long time. Outside the event loop Ctrl-C ends that at once.
    return RedisChild(data.redis, DEPLOYMENT, fsync=settings.redis_fsync) if settings.redis_url is None else None


def _read_order(settings: UpSettings, argv: Sequence[str], model: ModelInfo, gpus: int) -> "PlanOrder":
    # The planner takes a moment to import, which a start without a bound saves.
    from orca.cli.up.slo.start import read_order

    return read_order(settings, given_options(argv), model, gpus)


def _check_plan(file: str, model: ModelInfo) -> str | None:
    """Check that a plan is for a model. Returns: how its machine differs from this one. Raises: SettingError."""
    # The planner takes a moment to import, which a start without a plan saves.
    from orca.planner.profile.measuring.model_key import profile_key

    plan = load_plan(file)
    key = plan.device.key
    # The options of the plan are those of this start (planned.py).
    own = load_model_info(model.folder, dtype=model.dtype, quantization=model.quantization)
    wanted = profile_key(
        own, device=key.device, threads=key.threads, ranks=key.ranks, devices=key.devices, release=key.release
    )
    plan.check_model(wanted)
    return plan.other_machine(wanted)


def _with_plan(
    order: "PlanOrder", redis: RedisChild | None, data: local_resources.DataFolder, display: Display
) -> "Begun":
    """Make the plan. Args: redis: runs, because the pool has counted the lengths to plan for."""
    from orca.cli.up.slo.start import plan_start

    try:
        return plan_start(order, _pool_access(order, redis), data.folder, display)
    except BaseException:
        if redis is not None:
            asyncio.run(redis.stop())
        raise


def _pool_access(order: "PlanOrder", redis: RedisChild | None) -> "PoolAccess":
    from orca.cli.up.slo.start import PoolAccess

    url = order.settings.redis_url or ("" if redis is None else redis.url)
    return PoolAccess(url=url, login={} if redis is None else redis.login)


RestartSchedulers = Callable[[UpSettings], Awaitable[None]]

_Follow = Callable[[RestartSchedulers, Callable[[str], None]], Coroutine[Any, Any, None]]
"""Follows the plan of the running system until it is cancelled; it restarts schedulers, and prints events."""


def _follow_of(
    order: "PlanOrder",
    begun: "Begun",
    redis: RedisChild | None,
    argv: Sequence[str],
    choose: Callable[[UpSettings], UpSettings],
    folder: Path,
) -> _Follow | None:
    """Prepare to follow the plan. Returns: None if no plan can be made while the system runs, as without a profile.

    Args:
        argv: the options of this start.
        choose: returns settings with every unset option chosen.
    """
    from orca.cli.up.slo.applying import write_bounds
    from orca.cli.up.slo.following import FollowedSystem, Follower, Hands

    if begun.profile is None:
        return None
    settings = choose(begun.settings)
    write_bounds(folder, settings)
    system = FollowedSystem(
        order=order,
        profile=begun.profile,
        plan=begun.plan,
        settings=settings,
        pool=_pool_access(order, redis),
        folder=folder,
        argv=argv,
    )

    async def follow(restart: RestartSchedulers, report: Callable[[str], None]) -> None:
        await Follower(system, Hands(with_layout=choose, restart_schedulers=restart, report=report)).run()

    return follow


def _check_tokenizer(folder: Path) -> None:
    # `--help` and wrong options need no tokenizers library.
    from orca.core.domain.tokenizer_folder import check_tokenizer

    check_tokenizer(folder)


def _check_parts(settings: UpSettings) -> None:
    """Check the variables of all parts before any part starts. Raises: SettingError for what a part would refuse."""
    parse_pool_settings(os.environ)
    for kind, prefix in _PARTS:
        check_variables(kind, os.environ, prefix=prefix)
    KeyRing(GatewaySettings(model="", api_keys=settings.api_keys, api_keys_file=settings.api_keys_file))


def _examples(url: str, model: ModelInfo, settings: UpSettings) -> str:
    # Imported late, as in _check_tokenizer.
    from orca.core.domain.tokenizer_folder import has_chat_template

    return examples(
        url,
        model.name,
        has_keys=settings.has_keys,
        has_chats=has_chat_template(model.folder),
        is_encoder_decoder=model.encoder_decoder is not None,
    )


def _check_parallelism(settings: UpSettings, model: ModelInfo) -> None:
    """Raises: SettingError if the model cannot be divided over the stages and ranks."""
    if settings.stages > model.num_layers:
        raise SettingError(f"--stages {settings.stages} is more than the model's {_layers(model)}")
    if settings.layers is not None:
        read_layers(settings.layers, stages=settings.stages, num_layers=model.num_layers)
    heads = load_config(model.folder).num_heads
    if settings.tensor > heads:
        raise SettingError(f"--tensor {settings.tensor} is more than the model's {heads} attention heads")


def _layers(model: ModelInfo) -> str:
    """Return the number of layers in words, those of each stack if there are two."""
    if model.encoder_decoder is None:
        return f"{model.num_layers} layers"
    encoder = model.encoder_decoder.encoder_layers
    return f"{model.num_layers} layers ({encoder} encoder, {model.num_layers - encoder} decoder)"


def _check_slots(settings: UpSettings, model: ModelInfo) -> None:
    """Raises: SettingError if no request of the model fits into the slots of a group."""
    least = least_slots(DEFAULT_BLOCK_TOKENS, has_source=model.encoder_decoder is not None)
    if settings.slots is not None and settings.slots < least:
        raise SettingError(
            f"--slots {settings.slots} is less than {least}: source and target of a request have KV blocks of their "
            f"own, of {DEFAULT_BLOCK_TOKENS} slots each"
        )


async def _check_redis(url: str) -> None:
    """Raises: SettingError when no Redis answers at the URL, or when it cannot hold the pool."""
    # The import takes 0.1 s. A start with a Redis of its own does not need it.
    from orca.pool.redis.pool import open_redis_pool

    shown = re.sub(r"//[^/@]*@", "//...@", url)  # without its password
    try:
        pool = await open_redis_pool(url, DEPLOYMENT, parse_pool_settings(os.environ))
    except PoolUnavailable as error:
        raise SettingError(f"--redis-url {shown} does not answer: {error}") from error
    except SettingError as error:
        raise SettingError(f"--redis-url {shown}: {error}") from error
    await pool.close()


async def _serve(
    settings: UpSettings,
    model: ModelInfo,
    data: local_resources.DataFolder,
    redis: RedisChild | None,
    addresses: Addresses,
    gpus: tuple[str, ...],
    display: Display,
    follow: _Follow | None,
) -> int:
    """Run the system until a signal. Args: follow: follows its plan; None: no plan changes while it runs."""
    context = RuntimeContext(
        addresses=addresses,
        redis_url=settings.redis_url or (redis.url if redis else ""),
        redis_login=redis.login if redis else {},
        logs=data.fresh_logs(),
        # Seconds since 1970 rise from start to start, so the newest start decides which model is served.
        generation=int(time.time()),
        gpus=gpus,
        bounds_folder=None if follow is None else data.folder,
    )
    specs = plan(settings, model, context)
    if ignored := ignored_variables(settings, specs, os.environ):
        display.print_text(f"variables: WARNING: orca up ignores {', '.join(ignored)}")
    children: list[Supervised] = [] if redis is None else [redis]
    children += [Child(spec) for spec in specs]
    recovery = Recovery(children, display.report)
    supervisor = Supervisor(children, report=display.report, on_death=recovery.record_death)
    reasons: dict[str, str] = {}

    def record_break(scheduler: str, epoch: int, reason: str) -> None:
        reasons[scheduler] = reason
        if supervisor.was_up:
            recovery.record_break(scheduler, epoch)

    stopping = _signals_end(supervisor, display)
    running = asyncio.create_task(supervisor.run())
    logs = [(spec.name, spec.log) for spec in specs]
    watching = asyncio.create_task(follow_errors(logs, display.report, record_break))
    recovering = asyncio.create_task(recovery.run())
    probe = Probe(children, period_s=settings.probe_s, report=display.report)
    probing = asyncio.create_task(probe.run())
    starting = asyncio.create_task(_show_start(supervisor, settings, model, addresses, data.folder, reasons, display))
    stopped = asyncio.create_task(stopping.wait())
    tasks = [starting, watching, recovering, probing, stopped]

    async def restart(changed: UpSettings) -> None:
        await _restart_schedulers(supervisor, plan(changed, model, context))

    try:
        done, _ = await asyncio.wait({running, stopped, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting in done:
            await starting
            if follow is not None:
                tasks.append(asyncio.create_task(follow(restart, display.report)))
            await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await supervisor.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
    await running
    display.print_text("stopped")
    return 0


async def _restart_schedulers(supervisor: Supervisor, specs: Sequence[ProcessSpec]) -> None:
    """Start the schedulers again by other specs. They give their requests back to the pool, so nothing is lost."""
    wanted = {spec.name: spec for spec in specs if spec.role is Role.SCHEDULER}
    for child in supervisor.children:
        if isinstance(child, Child) and child.spec.name in wanted:
            await supervisor.restart(child, wanted[child.spec.name])


def _signals_end(supervisor: Supervisor, display: Display) -> asyncio.Event:
    """Set the returned event on the first SIGINT, SIGTERM or SIGHUP; kill all processes on the second."""
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            supervisor.kill()
            return
        display.print_text("\nstopping; press Ctrl-C again to kill")
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    return stopping


async def _show_start(
    supervisor: Supervisor,
    settings: UpSettings,
    model: ModelInfo,
    addresses: Addresses,
    folder: Path,
    reasons: Mapping[str, str],
    display: Display,
) -> None:
    began = time.monotonic()
    specs = [child.spec for child in supervisor.children]
    shown = [spec.name for spec in specs if spec.role in (Role.GATEWAY, Role.WORKER)]
    with display.progress(shown) as progress:
        await wait_until_ready(specs, progress.show, reason_of=reasons.get)
    supervisor.was_up = True
    url = f"http://{addresses.reached[0]}"
    precision = model.dtype if model.quantization is None else f"{model.dtype}, weights {model.quantization}"
    took = f"ready in {time.monotonic() - began:.0f} s"
    held = "requests and logs" if settings.redis_url is None else "logs"
    notes = [
        access_note(settings.host, len(settings.api_keys), settings.api_keys_file),
        f"data: {folder} ({held}; kept over restarts, delete the folder to start from scratch)",
        f"logs: {specs[-1].log.parent}/<process>.log",
    ]
    title = f"\nReady: {model.name} at {url} ({precision}; {took})"
    display.show_system(title, supervisor.children, notes)
    display.print_text(_examples(url, model, settings))
