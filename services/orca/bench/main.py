"""`orca bench`: measures what the paper measures, on a system that runs already or on one that it starts itself.

    serve         one trace against any OpenAI-compatible server
    overload      several times more than it can serve, by clients that try again
    sweep         median normalised latency against throughput per max batch size (ORCA, Figure 10)
    homogeneous   the same with requests that are all alike (Figure 11)
    engine        the time of one batch, injected until all its requests end, without a scheduler (Figure 9)
    chunks        prompts in chunks: throughput against the gaps between tokens, of the engine alone
    gpu           kernels, decode steps and a trace on a GPU, each beside its limit
    peers         beside Hugging Face transformers and OpenVINO GenAI, in one run on this machine
    host          scheduler, pool and gateway in front of an engine that computes nothing

What follows `--` goes to `orca up`.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from orca.bench import client, engine, overload, plot, report, simulate
from orca.bench.gpu import command as gpu
from orca.bench.options import (
    add_figures_option,
    add_output_options,
    add_server_options,
    add_trace_options,
    listed,
    not_negative,
    positive,
    process,
    program,
    trace_settings,
    trace_spec,
    write_figures,
    write_json,
)
from orca.bench.sweep import ANY_VOCAB, Measure, Sweep, measure_real, run_sweep
from orca.bench.trace import generate
from orca.cli.model_folder import find_model
from orca.core.domain.errors import ModelError, OrcaError, SettingError
from orca.core.domain.model import DTYPES, QUANTIZATIONS, load_model_info
from orca.core.process.command_line import CommandLineParser
from orca.scheduler.settings import POLICIES
from orca.worker.machine import thread_variables

_FLOAT32 = ("llama-63m", "llama-58m-gqa", "gpt2-8x384", "llama-500m", "llama-494m-tied")
PEER_SHAPES = (*_FLOAT32, *(f"{name}-bf16" for name in _FLOAT32))
"""What peers/model.py makes; it needs torch, which is not imported to read options."""


def main(argv: Sequence[str]) -> int:
    """Run one measurement. Returns: 0, 1 when it failed, 130 after Ctrl-C. Raises: SettingError for bad options."""
    ours, up_options = _split(argv)
    options = _parser().parse_args(ours)
    options.words = ["orca", "bench", *argv]
    try:
        return ACTIONS[options.action](options, up_options) or 0
    except (SettingError, ModelError):
        raise
    except OrcaError as error:
        print(f"orca bench {options.action}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our part of the line, and what follows `--`."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="orca bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=CommandLineParser)

    serve = actions.add_parser("serve", help="one trace against a running server")
    add_server_options(serve)
    serve.add_argument("--model", metavar="NAME", help="as the server calls it (its first one)")
    serve.add_argument("--rate", type=float, metavar="N", help="requests/s of a Poisson process (all at once)")
    serve.add_argument("--vocab-size", type=int, default=ANY_VOCAB, metavar="N", help="prompts use ids below it")
    serve.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one request (%(default)s s)")
    add_trace_options(serve, preset="small", requests=100)
    add_output_options(serve, can_plot=False)

    flood = actions.add_parser("overload", help="more than a running server can serve")
    add_server_options(flood)
    add = flood.add_argument
    add("--seconds", type=positive(float), default=60.0, metavar="S", help="of overload (%(default)s)")
    add("--factor", type=positive(float), default=10.0, metavar="X", help="calls, in capacities (%(default)s)")
    add("--clients", type=positive(int), default=32, metavar="N", help="at a time, for the capacity (%(default)s)")
    add("--retries", type=not_negative(int), default=2, metavar="N", help="of a refused call (%(default)s)")
    add("--gateway-process", type=process, metavar="PID", help="whose peak of memory is shown")
    add_trace_options(flood, preset="small", requests=100)
    add_figures_option(flood)

    sweep = actions.add_parser("sweep", help="latency against throughput (Figure 10)")
    _add_sweep_options(sweep)
    add_trace_options(sweep, preset="small", requests=100)
    homogeneous = actions.add_parser("homogeneous", help="the same with requests that are all alike (Figure 11)")
    _add_sweep_options(homogeneous)
    add_trace_options(homogeneous, preset=None, requests=100, lengths=(64, 32))

    alone = actions.add_parser("engine", help="one batch without a scheduler (Figure 9)")
    add = alone.add_argument
    add("--engine", choices=("real", "simulated"), default="real", help="real runs in this process (%(default)s)")
    add("--model", metavar="DIR", help="what it runs (the small model)")
    add("--dtype", choices=DTYPES, default="float32", help="what it computes in (%(default)s)")
    add("--quantization", choices=QUANTIZATIONS, help="what matrices are rounded to (none)")
    add("--batch-sizes", type=listed(positive(int)), default=(1, 2, 4, 8, 16), metavar="N,M", help="(1,2,4,8,16)")
    add(
        "--prompt-tokens",
        type=listed(positive(int)),
        default=(32, 128),
        metavar="N,M",
        help="of every request (32,128)",
    )
    add("--new-tokens", type=positive(int), default=32, metavar="N", help="of every request (%(default)s)")
    add("--rounds", type=positive(int), default=3, metavar="N", help="the median counts (%(default)s)")
    add("--threads", type=positive(int), default=len(os.sched_getaffinity(0)), metavar="N", help="(%(default)s)")
    simulate.add_engine_options(alone)
    add_output_options(alone, can_plot=True)

    chunks = actions.add_parser("chunks", help="prompts in chunks: throughput against the gaps between tokens")
    add = chunks.add_argument
    add("--model", metavar="DIR", help="what it runs (the small model)")
    add("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    bounds = listed(positive(int))
    add("--max-batch-tokens", type=bounds, default=(64, 128, 256), metavar="N,M", help="bounds (64,128,256)")
    add("--batch-size", type=positive(int), default=16, metavar="N", help="requests in a step (%(default)s)")
    add("--threads", type=positive(int), default=len(os.sched_getaffinity(0)), metavar="N", help="(%(default)s)")
    add("--rounds", type=positive(int), default=3, metavar="N", help="turns of each bound (%(default)s)")
    add_trace_options(chunks, preset="paper", requests=64)
    add_output_options(chunks, can_plot=False)

    gpu.add_options(actions.add_parser("gpu", help=gpu.HELP))
    _add_peers_options(actions.add_parser("peers", help="beside Hugging Face transformers, OpenVINO GenAI and vLLM"))
    _add_host_options(
        actions.add_parser("host", help="scheduler, pool and gateway in front of an engine that computes nothing")
    )
    return parser


def _add_peers_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group().add_argument
    model("--model", metavar="DIR", help="a folder (one is made)")
    model("--shape", choices=PEER_SHAPES, default=PEER_SHAPES[0], help="of the model that is made (%(default)s)")
    add("--rate", type=positive(float), metavar="N", help="requests/s of a Poisson process (all at once)")
    add("--batch-size", type=positive(int), default=16, metavar="N", help="of every system (%(default)s)")
    add("--threads", type=positive(int), default=2, metavar="N", help="of computation, in all (%(default)s)")
    add("--rounds", type=positive(int), default=3, metavar="N", help="turns of each system (%(default)s)")
    add("--judge-only", action="store_true", help="transformers judges and takes no part, as with --rate")
    add("--openvino", type=program, metavar="PYTHON", help="of an environment that has peers/openvino.txt (none)")
    add("--vllm", type=program, metavar="PYTHON", help="of an environment that has peers/vllm.txt (none)")
    add_trace_options(parser, preset="small", requests=128)
    add_output_options(parser, can_plot=False)


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    sizes = listed(positive(int))
    add("--batch-sizes", type=sizes, default=(16, 64, 256, 512), metavar="N,M", help="a run each (16,64,256,512)")
    add("--step-us", type=not_negative(int), default=0, metavar="N", help="time of a step of any size (%(default)s)")
    numbers = listed(not_negative(int))
    add("--waiting", type=numbers, default=(1000,), metavar="N,M", help="requests behind them, a run each (1000)")
    add("--tokens", type=positive(int), default=100_000, metavar="N", help="of a run, at least (%(default)s)")
    add("--streams", type=sizes, default=(64, 256), metavar="N,M", help="at a time, a run each (64,256)")
    add("--waiting-streams", type=numbers, default=(0,), metavar="N,M", help="open behind them, a run each (0)")
    add("--rate", type=positive(float), default=4000.0, metavar="N", help="tokens/s of all streams (%(default)g)")
    add("--schedulers", type=sizes, default=(1,), metavar="N,M", help="groups on one pool, a run each (1)")
    add("--gateways", type=sizes, default=(1,), metavar="N,M", help="processes on one pool, a run each (1)")
    add("--only", choices=("commits", "events"), help="one of the two parts")
    add_output_options(parser, can_plot=False)


def _add_sweep_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine", choices=("real", "simulated"), default="real", help="real starts `orca up` itself (%(default)s)")
    add("--model", metavar="DIR", help="what `orca up` serves (its own small model)")
    add("--policies", type=listed(str), default=POLICIES, metavar="A,B", help="(iteration,request_level)")
    add(
        "--max-batch-sizes", type=listed(positive(int)), default=(1, 8, 16), metavar="N,M", help="a curve each (1,8,16)"
    )
    add("--rates", type=listed(positive(float)), metavar="X,Y", help="arrival rates in requests/s, a point each")
    simulate.add_engine_options(parser)
    simulate.add_baseline_options(parser)
    add_output_options(parser, can_plot=True)


def _serve(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    _refuse(up_options)
    trace = generate(trace_spec(options, options.rate))
    probe = client.Target(url=options.url, model="", vocab_size=options.vocab_size, api_key=options.api_key)

    async def run() -> tuple[str, list[report.Outcome]]:
        model = options.model or (await client.served_models(probe))[0]
        target = client.Target(
            url=options.url,
            model=model,
            vocab_size=options.vocab_size,
            api_key=options.api_key,
            timeout_s=options.timeout,
        )
        return model, await client.run_trace(target, trace)

    try:
        model, outcomes = asyncio.run(run())
    except (OSError, ValueError) as error:
        raise BenchFailed(f"{options.url} does not answer as it should: {error}") from error
    figures = report.summarise(outcomes)
    print("\n".join(report.lines(figures)))
    write_json(options.json, report.to_json(figures))
    if figures.errors:
        raise BenchFailed(f"{sum(figures.errors.values())} of {len(outcomes)} requests failed")
    write_figures(options, report.figures(figures, {"model": model, **trace_settings(options, options.rate)}))


def _overload(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    _refuse(up_options)
    trace = generate(trace_spec(options, None))
    probe = client.Target(url=options.url, model="", vocab_size=ANY_VOCAB, api_key=options.api_key)
    asked = overload.Overloading(
        seconds=options.seconds,
        factor=options.factor,
        clients=options.clients,
        retries=options.retries,
        seed=options.seed,
    )

    async def run() -> tuple[str, overload.Figures]:
        [model, *_] = await client.served_models(probe)
        return model, await overload.measure(replace(probe, model=model), trace, asked)

    try:
        model, figures = asyncio.run(run())
    except (OSError, ValueError) as error:
        raise BenchFailed(f"{options.url} does not answer as it should: {error}") from error
    if not figures.capacity_per_s:
        raise BenchFailed("no request ended while the capacity was measured")
    print("\n".join(overload.lines(figures)))
    peak = None
    if options.gateway_process is not None:
        peak = overload.peak_memory_mib(options.gateway_process)
        print(f"most memory of process {options.gateway_process}: {peak:.0f} MiB")
    if figures.broken:
        raise BenchFailed(f"{len(figures.broken)} accepted calls did not end whole, the first: {figures.broken[0]}")
    write_figures(options, overload.measured_figures(figures, asked, {"model": model}, peak))


class BenchFailed(OrcaError):
    """A measurement that cannot be trusted or could not be made."""


def _sweep(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    _run_sweep(options, up_options, is_normalised=True)


def _homogeneous(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    _run_sweep(options, up_options, is_normalised=False)


def _run_sweep(options: argparse.Namespace, up_options: Sequence[str], *, is_normalised: bool) -> None:
    baseline, model = simulate.baseline(options), None
    if options.engine == "simulated":
        _refuse(up_options)
        measure: Measure = replace(simulate.simulation(options), baseline=baseline).measure
    else:
        simulate.refuse_engine_options(options)
        model = options.model or _small_model()
        measure = measure_real(model, up_options, baseline, vocab_size=_vocabulary(find_model(model)[0]))
    sweep = Sweep(
        spec=trace_spec(options, None),
        policies=simulate.known_policies(options.policies),
        baseline=baseline,
        max_batch_sizes=options.max_batch_sizes,
        rates=options.rates or (simulate.RATES if options.engine == "simulated" else (1.0, 2.0, 4.0, 8.0, 16.0)),
    )
    points = run_sweep(sweep, measure, _progress)
    simulate.show(points, options, is_normalised=is_normalised, model=None if model is None else _name(model))


def _engine(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    _refuse(up_options)
    batches = [
        engine.BatchShape(requests=size, prompt_tokens=length, new_tokens=options.new_tokens)
        for length in options.prompt_tokens
        for size in options.batch_sizes
    ]
    is_simulated = options.engine == "simulated"
    if is_simulated:
        base = simulate.simulation(options)
        times = engine.time_simulated(base.shape, base.cost, batches)
    else:
        simulate.refuse_engine_options(options, but=("stages",))
        os.environ.update(thread_variables(options.threads))
        times = engine.time_local(
            options.model or _small_model(),
            batches,
            dtype=options.dtype,
            quantization=options.quantization,
            stages=options.stages or 1,
            threads=options.threads,
            rounds=options.rounds,
        )
    print("\n".join(engine.lines(times)))
    write_json(options.json, engine.to_json(times))
    settings = {
        "engine": "simulated" if is_simulated else None,
        "model": options.simulate or "175b" if is_simulated else _name(options.model or _small_model()),
        "dtype": None if is_simulated else options.dtype,
        "quantization": None if is_simulated else options.quantization or "none",
        "stages": options.stages,
        "threads": None if is_simulated else options.threads,
    }
    measured = engine.figures(times, settings, rounds=1 if is_simulated else options.rounds)
    write_figures(options, measured, device="virtual time" if is_simulated else None)
    if options.plot is not None:
        plot.plot_batches(times, options.plot)


def _name(model: str) -> str:
    """Return what figures call a model: the last part of its folder's or its hub's name."""
    return Path(model).name


def _small_model() -> str:
    from orca.cli.small_model import small_model_folder

    return str(small_model_folder())


def _vocabulary(folder: Path) -> int:
    return load_model_info(folder).vocab_size


def _chunks(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    os.environ.update(thread_variables(options.threads))
    from orca.bench import chunks  # torch: only here
    from orca.bench.peers.workload import Workload

    _refuse(up_options)
    folder, _ = find_model(options.model or _small_model())
    trace = generate(trace_spec(options, None))
    workload = Workload.of(trace, folder, _vocabulary(folder), batch_size=options.batch_size, threads=options.threads)
    runs = chunks.measure(workload, options.max_batch_tokens, dtype=options.dtype, rounds=options.rounds, say=_progress)
    print("\n".join(chunks.lines(runs)))
    write_json(options.json, chunks.to_json(runs))
    dtype = None if options.dtype == "float32" else options.dtype
    lengths = trace_settings(options, None)["lengths"]
    write_figures(options, chunks.figures(runs, {"model": folder.name, "dtype": dtype, "lengths": lengths}))


def _peers(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    from orca.bench.peers import compare, figures, table  # torch and safetensors: only here

    compare.check_environments(options.openvino, options.vllm)
    trace = generate(trace_spec(options, options.rate))
    given = None if options.model is None else find_model(options.model)[0]
    with TemporaryDirectory(prefix="orca-peers-") as folder:
        model = given or compare.made_model(options.shape, Path(folder), _progress)
        contest = compare.Contest(
            model=model,
            vocab_size=_vocabulary(model),
            trace=trace,
            batch_size=options.batch_size,
            threads=options.threads,
            rounds=options.rounds,
            up_options=compare.up_options(options.batch_size, options.threads, up_options),
            folder=Path(folder),
            openvino=options.openvino,
            vllm=options.vllm,
            only_judges=options.judge_only,
        )
        standings = compare.compare(contest, _progress)
        print("\n".join(table.lines(contest, standings)))
        write_json(options.json, table.to_json(contest, standings))
        write_figures(options, figures.figures(contest, standings, trace_settings(options, options.rate)))


def _host(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    from orca.bench.host import figures as host  # Redis and tokenizers: only here
    from orca.bench.host import run

    _refuse(up_options)
    plan = run.Plan(
        batch_sizes=() if options.only == "events" else options.batch_sizes,
        step_us=options.step_us,
        waiting=options.waiting,
        tokens=options.tokens,
        streams=() if options.only == "commits" else options.streams,
        tokens_per_s=options.rate,
        schedulers=options.schedulers,
        gateways=options.gateways,
        waiting_streams=options.waiting_streams,
    )
    with TemporaryDirectory(prefix="orca-host-") as folder:
        figures = run.measure(plan, Path(_small_model()), Path(folder), _progress)
    print("\n".join(run.lines(figures)))
    write_json(options.json, run.to_json(figures))
    write_figures(options, host.figures(figures))


def _refuse(up_options: Sequence[str]) -> None:
    if up_options:
        raise SettingError(f"nothing is started here that could take {' '.join(up_options)}")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


ACTIONS: Mapping[str, Callable[[argparse.Namespace, Sequence[str]], int | None]] = {
    "serve": _serve,
    "overload": _overload,
    "sweep": _sweep,
    "homogeneous": _homogeneous,
    "engine": _engine,
    "chunks": _chunks,
    "gpu": gpu.act,
    "peers": _peers,
    "host": _host,
}
