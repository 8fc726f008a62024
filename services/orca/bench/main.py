"""`orca bench`: repeats the measurements of the paper, on a running system or on one that it starts itself.

    serve         one trace against any OpenAI-compatible server
    deadlines     orders of claims: answers in time at several times the capacity (TCB)
    turns         the prefix cache: conversations, choices of one prompt, and repairs, with and without it
    overload      several times more load than a running server can serve, from clients that try again
    sweep         median normalised latency against throughput per max batch size (ORCA, Figure 10)
    homogeneous   the same with requests of equal length (Figure 11)
    engine        the time of one batch until all its requests end, without a scheduler (Figure 9)
    chunks        prompts in chunks: throughput against the gaps between tokens, on the engine alone
    encoder       the encoder of an encoder-decoder model, against the machine's rate of matrix products
    grammars      structured output: the cost of a mask, and the engine with and without a schema
    gpu           kernels, decode steps and a trace on a GPU, each compared with its limit
    peers         comparison with Hugging Face transformers, OpenVINO GenAI, vLLM and CTranslate2, in one run
    plan          predictions of the planner against measurements
    exegpt        results of the ExeGPT paper on round-robin allocation, by simulation
    host          scheduler, pool and gateway with an engine that computes nothing

Arguments after `--` are options for `orca up`.
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
from orca.bench.deadlines import command as deadlines
from orca.bench.exegpt import command as exegpt
from orca.bench.figures.figure import Setting
from orca.bench.gpu import command as gpu
from orca.bench.options import (
    add_figures_option,
    add_output_options,
    add_server_options,
    add_trace_options,
    comma_separated,
    not_negative,
    positive,
    process_id,
    program_path,
    trace_settings,
    trace_spec,
    write_figures,
    write_json,
)
from orca.bench.plan import command as plan
from orca.bench.sweep import ANY_VOCAB, Measure, Sweep, measure_real, run_sweep
from orca.bench.turns import command as turns
from orca.bench.turns.conversations import ConversationSpec
from orca.bench.turns.trace import conversation_trace
from orca.cli.model_folder import find_model
from orca.cli.small_model import CONTINUES
from orca.core.domain.errors import ModelError, OrcaError, SettingError
from orca.core.domain.model import DTYPES, QUANTIZATIONS, load_model_info
from orca.core.process.command_line import CommandLineParser
from orca.planner.simulate.outcomes import RequestOutcome, summarise
from orca.planner.workload.trace import TraceSpec, generate
from orca.worker.machine import thread_variables

SEQ2SEQ_SHAPES = ("t5-60m", "bart-60m")
"""Names of the encoder-decoder models among them."""
_FLOAT32 = ("llama-63m", "llama-58m-gqa", "gpt2-8x384", "llama-500m", "llama-494m-tied", *SEQ2SEQ_SHAPES)
PEER_SHAPES = (*_FLOAT32, *(f"{name}-bf16" for name in _FLOAT32))
"""Names of the models that peers/model.py can make. That module imports torch, which reading options does not need."""


def main(argv: Sequence[str]) -> int:
    """Run one measurement. Returns: 0, 1 if it failed, 130 after Ctrl-C. Raises: SettingError for bad options."""
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
    """Return the arguments before `--` and those after it."""
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

    _add_serve_options(actions.add_parser("serve", help="one trace against a running server"))
    _add_overload_options(actions.add_parser("overload", help="more load than a running server can serve"))
    sweep = actions.add_parser("sweep", help="latency against throughput (Figure 10)")
    _add_sweep_options(sweep)
    add_trace_options(sweep, preset="small", requests=100)
    homogeneous = actions.add_parser("homogeneous", help="the same with requests of equal length (Figure 11)")
    _add_sweep_options(homogeneous)
    add_trace_options(homogeneous, preset=None, requests=100, lengths=(64, 32))
    _add_engine_options(actions.add_parser("engine", help="one batch without a scheduler (Figure 9)"))
    _add_encoder_options(
        actions.add_parser("encoder", help="an encoder alone, against the machine's rate of matrix products")
    )
    _add_chunks_options(
        actions.add_parser("chunks", help="prompts in chunks: throughput against the gaps between tokens")
    )
    _add_grammars_options(actions.add_parser("grammars", help="what structured output costs"))
    gpu.add_options(actions.add_parser("gpu", help=gpu.HELP))
    _add_peers_options(
        actions.add_parser(
            "peers", help="comparison with Hugging Face transformers, OpenVINO GenAI, vLLM and CTranslate2"
        )
    )
    deadlines.add_options(actions.add_parser("deadlines", help=deadlines.HELP))
    turns.add_options(actions.add_parser("turns", help=turns.HELP))
    plan.add_options(actions.add_parser("plan", help=plan.HELP))
    exegpt.add_options(actions.add_parser("exegpt", help=exegpt.HELP))
    _add_host_options(
        actions.add_parser("host", help="scheduler, pool and gateway with an engine that computes nothing")
    )
    return parser


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    add = parser.add_argument
    add("--model", metavar="NAME", help="model name for the server (its first model)")
    add("--rate", type=positive(float), metavar="N", help="requests/s of a Poisson process (all at once)")
    add(
        "--vocab-size",
        type=positive(int),
        default=ANY_VOCAB,
        metavar="N",
        help="prompts use token ids below N (%(default)s)",
    )
    add("--timeout", type=positive(float), default=600.0, metavar="S", help="seconds for one request (%(default)s)")
    add_trace_options(parser, preset="small", requests=100)
    add_output_options(parser, can_plot=False)


def _add_overload_options(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    add = parser.add_argument
    add("--seconds", type=positive(float), default=60.0, metavar="S", help="seconds of overload (%(default)s)")
    add(
        "--factor",
        type=positive(float),
        default=10.0,
        metavar="X",
        help="arrival rate as a multiple of the capacity (%(default)s)",
    )
    add(
        "--clients",
        type=positive(int),
        default=32,
        metavar="N",
        help="concurrent clients while the capacity is measured (%(default)s)",
    )
    add("--retries", type=not_negative(int), default=2, metavar="N", help="retries of a refused call (%(default)s)")
    add("--gateway-process", type=process_id, metavar="PID", help="show the peak memory of this process")
    add_trace_options(parser, preset="small", requests=100)
    add_figures_option(parser)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add, numbers = parser.add_argument, comma_separated(positive(int))
    add("--engine", choices=("real", "simulated"), default="real", help="real runs in this process (%(default)s)")
    add("--model", metavar="DIR", help="model to run (the small model)")
    add("--dtype", choices=DTYPES, default="float32", help="data type of the computation (%(default)s)")
    add("--quantization", choices=QUANTIZATIONS, help="quantization of the weight matrices (none)")
    sizes = (1, 2, 4, 8, 16)
    add("--batch-sizes", type=numbers, default=sizes, metavar="N,M", help="requests in a batch (1,2,4,8,16)")
    add("--prompt-tokens", type=numbers, default=(32, 128), metavar="N,M", help="tokens of every prompt (32,128)")
    add(
        "--new-tokens", type=positive(int), default=32, metavar="N", help="tokens to generate per request (%(default)s)"
    )
    add(
        "--rounds",
        type=positive(int),
        default=3,
        metavar="N",
        help="runs of each batch; the median counts (%(default)s)",
    )
    _add_threads_option(parser)
    simulate.add_engine_options(parser)
    add_output_options(parser, can_plot=True)


def _add_chunks_options(parser: argparse.ArgumentParser) -> None:
    add, bounds = parser.add_argument, comma_separated(positive(int))
    add("--model", metavar="DIR", help="model to run (the small model)")
    add("--dtype", choices=DTYPES, default="float32", help="data type of the computation (%(default)s)")
    add("--max-batch-tokens", type=bounds, default=(64, 128, 256), metavar="N,M", help="tokens of a step (64,128,256)")
    add("--batch-size", type=positive(int), default=16, metavar="N", help="requests in a step (%(default)s)")
    _add_threads_option(parser)
    add("--rounds", type=positive(int), default=3, metavar="N", help="runs of each bound (%(default)s)")
    add_trace_options(parser, preset="paper", requests=64)
    add_output_options(parser, can_plot=False)


def _add_encoder_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group().add_argument
    model("--model", metavar="DIR", help="encoder-decoder model (a new one with random weights)")
    model("--shape", choices=SEQ2SEQ_SHAPES, default=SEQ2SEQ_SHAPES[0], help="shape of the new model (%(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="data type of the computation (%(default)s)")
    shown = "sources and tokens of each, in one step (1x512,16x32,4x128)"
    add("--sources", type=comma_separated(_sources), default=((1, 512), (16, 32), (4, 128)), metavar="NxM", help=shown)
    add("--rounds", type=positive(int), default=25, metavar="N", help="runs of each (%(default)s)")
    _add_threads_option(parser)
    add_output_options(parser, can_plot=False)


def _add_grammars_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", choices=_FLOAT32[:5], default=_FLOAT32[0], help="shape of the random model (%(default)s)")
    add("--batch-size", type=positive(int), default=16, metavar="N", help="requests of a step (%(default)s)")
    shown = "vocabularies of a matcher alone (2048,150000)"
    add("--vocabularies", type=comma_separated(positive(int)), default=(2048, 150_000), metavar="N,N", help=shown)
    add("--tokens", type=positive(int), default=2000, metavar="N", help="tokens of its output (%(default)s)")
    add("--rounds", type=positive(int), default=5, metavar="N", help="runs of the engine on each side (%(default)s)")
    shown = "seconds of hostile grammars beside clients of a whole Orca, and nothing else"
    add("--hostile-s", type=positive(float), metavar="N", help=shown)
    _add_threads_option(parser)
    add_trace_options(parser, preset="small", requests=64)
    add_output_options(parser, can_plot=False)


def _sources(text: str) -> tuple[int, int]:
    count, _, tokens = text.partition("x")
    try:
        found = positive(int)(count), positive(int)(tokens)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number of sources and their tokens, such as 16x32") from None
    return found


def _add_threads_option(parser: argparse.ArgumentParser) -> None:
    processors = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads", type=positive(int), default=processors, metavar="N", help="threads of computation (%(default)s)"
    )


def _add_peers_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group().add_argument
    model("--model", metavar="DIR", help="model folder (a new one with random weights)")
    model("--shape", choices=PEER_SHAPES, default=PEER_SHAPES[0], help="shape of the new model (%(default)s)")
    add("--rate", type=positive(float), metavar="N", help="requests/s of a Poisson process (all at once)")
    add("--batch-size", type=positive(int), default=16, metavar="N", help="requests in a batch (%(default)s)")
    add("--threads", type=positive(int), default=2, metavar="N", help="threads of computation per system (%(default)s)")
    add("--rounds", type=positive(int), default=3, metavar="N", help="runs of each system (%(default)s)")
    shared = "instead of a trace: conversations of N turns, as many as the batch; all systems use their prefix caches"
    add("--turns", type=positive(int), metavar="N", help=shared)
    add("--judge-only", action="store_true", help="transformers only judges the tokens, as with --rate")
    add("--openvino", type=program_path, metavar="PYTHON", help="Python of an environment with peers/openvino.txt")
    add("--vllm", type=program_path, metavar="PYTHON", help="Python of an environment with peers/vllm.txt")
    add(
        "--ctranslate2",
        type=program_path,
        metavar="PYTHON",
        help="Python of an environment with peers/ctranslate2.txt; for encoder-decoder models",
    )
    add_trace_options(parser, preset="small", requests=128)
    add_output_options(parser, can_plot=False)


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    sizes, sizes_or_0 = comma_separated(positive(int)), comma_separated(not_negative(int))
    default = (16, 64, 256, 512)
    add("--batch-sizes", type=sizes, default=default, metavar="N,M", help="one run per batch size (16,64,256,512)")
    add("--step-us", type=not_negative(int), default=0, metavar="N", help="microseconds of every step (%(default)s)")
    add(
        "--waiting",
        type=sizes_or_0,
        default=(1000,),
        metavar="N,M",
        help="further requests that wait, one run per number (1000)",
    )
    add("--tokens", type=positive(int), default=100_000, metavar="N", help="least tokens of a run (%(default)s)")
    add(
        "--streams",
        type=sizes,
        default=(64, 256),
        metavar="N,M",
        help="concurrent streams, one run per number (64,256)",
    )
    add(
        "--waiting-streams",
        type=sizes_or_0,
        default=(0,),
        metavar="N,M",
        help="further streams whose requests wait, one run per number (0)",
    )
    add("--rate", type=positive(float), default=4000.0, metavar="N", help="tokens/s of all streams (%(default)g)")
    add("--schedulers", type=sizes, default=(1,), metavar="N,M", help="schedulers of one pool, one run per number (1)")
    add("--gateways", type=sizes, default=(1,), metavar="N,M", help="gateways of one pool, one run per number (1)")
    add("--only", choices=("commits", "events", "refusals"), help="measure only this part (commits, events)")
    intervals = "refusals: seconds between two bad prompts, one run per number (2)"
    add("--refused-every", type=comma_separated(positive(float)), default=(2.0,), metavar="S,T", help=intervals)
    add_output_options(parser, can_plot=False)


def _add_sweep_options(parser: argparse.ArgumentParser) -> None:
    add, sizes = parser.add_argument, comma_separated(positive(int))
    add("--engine", choices=("real", "simulated"), default="real", help="real starts `orca up` itself (%(default)s)")
    add("--model", metavar="DIR", help="model for `orca up` (its own small model)")
    compared = simulate.COMPARED
    add("--policies", type=comma_separated(str), default=compared, metavar="A,B", help=simulate.POLICIES_HELP)
    add("--max-batch-sizes", type=sizes, default=(1, 8, 16), metavar="N,M", help="one curve per size (1,8,16)")
    rates = "arrival rates in requests/s, one point per rate"
    add("--rates", type=comma_separated(positive(float)), metavar="X,Y", help=rates)
    simulate.add_engine_options(parser)
    simulate.add_baseline_options(parser)
    simulate.add_cycle_options(parser)
    add_output_options(parser, can_plot=True)


def _serve(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    _refuse_up_options(up_options)
    trace = generate(trace_spec(options, options.rate))
    probe = client.LoadTarget(url=options.url, model="", vocab_size=options.vocab_size, api_key=options.api_key)

    async def run() -> tuple[str, list[RequestOutcome]]:
        model = options.model or (await client.served_models(probe))[0]
        target = client.LoadTarget(
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
        raise BenchFailed(f"{options.url} does not answer as expected: {error}") from error
    figures = summarise(outcomes)
    print("\n".join(report.lines(figures)))
    write_json(options.json, report.to_json(figures))
    if figures.errors:
        raise BenchFailed(f"{sum(figures.errors.values())} of {len(outcomes)} requests failed")
    write_figures(options, report.figures(figures, {"model": model, **trace_settings(options, options.rate)}))


def _overload(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    _refuse_up_options(up_options)
    trace = generate(trace_spec(options, None))
    probe = client.LoadTarget(url=options.url, model="", vocab_size=ANY_VOCAB, api_key=options.api_key)
    asked = overload.OverloadSettings(
        seconds=options.seconds,
        factor=options.factor,
        clients=options.clients,
        retries=options.retries,
        seed=options.seed,
    )

    async def run() -> tuple[str, overload.OverloadFigures]:
        [model, *_] = await client.served_models(probe)
        return model, await overload.measure(replace(probe, model=model), trace, asked)

    try:
        model, figures = asyncio.run(run())
    except (OSError, ValueError) as error:
        raise BenchFailed(f"{options.url} does not answer as expected: {error}") from error
    if not figures.capacity_per_s:
        raise BenchFailed("no request ended while the capacity was measured")
    print("\n".join(overload.lines(figures)))
    peak = None
    if options.gateway_process is not None:
        peak = overload.peak_memory_mib(options.gateway_process)
        print(f"peak memory of process {options.gateway_process}: {peak:.0f} MiB")
    if figures.broken:
        raise BenchFailed(
            f"{len(figures.broken)} accepted calls did not get all tokens, the first: {figures.broken[0]}"
        )
    write_figures(options, overload.measured_figures(figures, asked, {"model": model}, peak))


class BenchFailed(OrcaError):
    """A measurement failed, or its figures cannot be trusted."""


def _sweep(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    _run_sweep(options, up_options, is_normalised=True)


def _homogeneous(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    _run_sweep(options, up_options, is_normalised=False)


def _run_sweep(options: argparse.Namespace, up_options: Sequence[str], *, is_normalised: bool) -> None:
    baseline, cycle, model = simulate.baseline(options), simulate.cycle(options), None
    if options.engine == "simulated":
        _refuse_up_options(up_options)
        measure: Measure = replace(simulate.simulation(options), baseline=baseline, cycle=cycle).measure
    else:
        simulate.refuse_engine_options(options)
        model = options.model or _small_model()
        measure = measure_real(model, up_options, baseline, cycle, vocab_size=_vocab_size(find_model(model)[0]))
    sweep = Sweep(
        spec=trace_spec(options, None),
        policies=simulate.known_policies(options.policies),
        baseline=baseline,
        cycle=cycle,
        max_batch_sizes=options.max_batch_sizes,
        rates=options.rates or (simulate.RATES if options.engine == "simulated" else (1.0, 2.0, 4.0, 8.0, 16.0)),
    )
    points = run_sweep(sweep, measure, _print_progress)
    simulate.show(points, options, is_normalised=is_normalised, model=None if model is None else _short_name(model))


def _engine(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    _refuse_up_options(up_options)
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
        "model": options.simulate or "175b" if is_simulated else _short_name(options.model or _small_model()),
        "dtype": None if is_simulated else options.dtype,
        "quantization": None if is_simulated else options.quantization or "none",
        "stages": options.stages,
        "threads": None if is_simulated else options.threads,
    }
    measured = engine.figures(times, settings, rounds=1 if is_simulated else options.rounds)
    write_figures(options, measured, device="virtual time" if is_simulated else None)
    if options.plot is not None:
        plot.plot_batches(times, options.plot)


def _short_name(model: str) -> str:
    """Return the name of a model in figures: the last part of its folder or of its name on the hub."""
    return Path(model).name


def _small_model() -> str:
    from orca.cli.small_model import small_model_folder

    return str(small_model_folder())


def _vocab_size(folder: Path) -> int:
    return load_model_info(folder).vocab_size


def _encoder(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    os.environ.update(thread_variables(options.threads))
    from orca.bench.parts import encoder  # torch and safetensors: only here
    from orca.bench.peers.compare import make_random_model

    _refuse_up_options(up_options)
    given_model = None if options.model is None else find_model(options.model)[0]
    with TemporaryDirectory(prefix="orca-encoder-") as folder:
        model = given_model or make_random_model(options.shape, Path(folder), _print_progress)
        stage = encoder.load_encoder(model, dtype=options.dtype, threads=options.threads)
    times = encoder.measure(stage, [encoder.Sources(*each) for each in options.sources], rounds=options.rounds)
    idle_s = encoder.time_idle_steps(stage, rounds=20 * options.rounds)
    print("\n".join(encoder.lines(times, idle_s)))
    write_json(options.json, encoder.to_json(times))
    name = options.shape if options.model is None else _short_name(options.model)
    settings = {"model": name, "dtype": options.dtype, "threads": options.threads}
    write_figures(options, encoder.figures(times, idle_s, settings))


def _grammars(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    os.environ.update(thread_variables(options.threads))
    if options.hostile_s is not None:
        _hostile_grammars(options, up_options)
        return
    from orca.bench.parts import grammars  # torch: only here
    from orca.bench.peers.compare import make_random_model
    from orca.bench.peers.workload import PeerWorkload

    _refuse_up_options(up_options)
    matchers = [grammars.time_matcher(vocab, options.tokens) for vocab in options.vocabularies]
    trace = generate(trace_spec(options, None))
    with TemporaryDirectory(prefix="orca-grammars-") as folder:
        model = make_random_model(options.shape, Path(folder), _print_progress)
        sizes = {"batch_size": options.batch_size, "threads": options.threads}
        workload = PeerWorkload.of(trace, model, _vocab_size(model), **sizes)
        speeds = grammars.measure_engine(model, workload, options.rounds)
    print("\n".join(grammars.lines(matchers, speeds)))
    write_json(options.json, grammars.to_json(matchers, speeds))
    settings = {
        "model": options.shape,
        "batch": options.batch_size,
        "lengths": trace_settings(options, None)["lengths"],
    }
    write_figures(options, grammars.figures(matchers, speeds, settings))


def _hostile_grammars(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    from orca.bench.parts import hostile_neighbours as neighbours

    load = neighbours.HostileLoad(seconds=options.hostile_s)
    model, _ = find_model(CONTINUES)
    with TemporaryDirectory(prefix="orca-hostile-") as folder:
        run = neighbours.measure(CONTINUES, load, Path(folder), up_options, _vocab_size(model))
        found = asyncio.run(run)
    print("\n".join(neighbours.lines(found)))
    write_json(options.json, neighbours.to_json(found))
    write_figures(options, neighbours.figures(found, {"model": CONTINUES}))


def _chunks(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    os.environ.update(thread_variables(options.threads))
    from orca.bench import chunks  # torch: only here
    from orca.bench.peers.workload import PeerWorkload

    _refuse_up_options(up_options)
    folder, _ = find_model(options.model or _small_model())
    trace = generate(trace_spec(options, None))
    workload = PeerWorkload.of(
        trace, folder, _vocab_size(folder), batch_size=options.batch_size, threads=options.threads
    )
    runs = chunks.measure(
        workload, options.max_batch_tokens, dtype=options.dtype, rounds=options.rounds, report_progress=_print_progress
    )
    print("\n".join(chunks.lines(runs)))
    write_json(options.json, chunks.to_json(runs))
    dtype = None if options.dtype == "float32" else options.dtype
    lengths = trace_settings(options, None)["lengths"]
    write_figures(options, chunks.figures(runs, {"model": folder.name, "dtype": dtype, "lengths": lengths}))


def _peers(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    from orca.bench.peers import compare, figures, table  # torch and safetensors: only here
    from orca.bench.peers.comparison import PeerComparison

    pythons = {"openvino": options.openvino, "vllm": options.vllm, "ctranslate2": options.ctranslate2}
    compare.check_environments(**pythons)
    spec = _peers_spec(options)
    given_model = None if options.model is None else find_model(options.model)[0]
    with TemporaryDirectory(prefix="orca-peers-") as folder:
        model = given_model or compare.make_random_model(options.shape, Path(folder), _print_progress)
        info = load_model_info(model)
        is_encoder_decoder = info.encoder_decoder is not None
        compare.check_kind(**pythons, is_encoder_decoder=is_encoder_decoder)
        if options.turns is not None and is_encoder_decoder:
            raise SettingError("--turns is for decoder-only models: others have no prefix cache")
        comparison = PeerComparison(
            model=model,
            vocab_size=info.vocab_size,
            trace=conversation_trace(spec, info.vocab_size) if isinstance(spec, ConversationSpec) else generate(spec),
            batch_size=options.batch_size,
            threads=options.threads,
            rounds=options.rounds,
            up_options=compare.up_options(options.batch_size, options.threads, up_options),
            folder=Path(folder),
            is_encoder_decoder=is_encoder_decoder,
            only_judges=options.judge_only,
            **pythons,
        )
        results = compare.compare(comparison, _print_progress)
        print("\n".join(table.lines(comparison, results)))
        write_json(options.json, table.to_json(comparison, results))
        write_figures(options, figures.figures(comparison, results, _peers_settings(options)))


def _peers_spec(options: argparse.Namespace) -> TraceSpec | ConversationSpec:
    """Return the settings of the requests of a comparison. Raises: SettingError."""
    if options.turns is None:
        return trace_spec(options, options.rate)
    for name in ("rate", "preset", "prompt_tokens", "new_tokens", "task", "lengths"):
        if getattr(options, name) is not None:
            raise SettingError(f"--turns names the requests already: leave --{name.replace('_', '-')} out")
    return ConversationSpec(
        conversations=options.batch_size,
        turns=options.turns,
        system_tokens=turns.SYSTEM_TOKENS,
        question_tokens=turns.QUESTION_TOKENS,
        answer_tokens=turns.ANSWER_TOKENS,
        seed=options.seed,
    )


def _peers_settings(options: argparse.Namespace) -> dict[str, Setting]:
    if options.turns is None:
        return trace_settings(options, options.rate)
    return {"load": "all at once", "lengths": f"conversations of {options.turns} turns"}


def _host(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    from orca.bench.host import figures as host  # Redis and tokenizers: only here
    from orca.bench.host import run

    _refuse_up_options(up_options)
    plan = run.HostPlan(
        batch_sizes=options.batch_sizes if options.only in (None, "commits") else (),
        step_us=options.step_us,
        waiting=options.waiting,
        tokens=options.tokens,
        streams=options.streams if options.only in (None, "events") else (),
        tokens_per_s=options.rate,
        schedulers=options.schedulers,
        gateways=options.gateways,
        waiting_streams=options.waiting_streams,
        refusals=options.refused_every if options.only == "refusals" else (),
    )
    with TemporaryDirectory(prefix="orca-host-") as folder:
        figures = run.measure(plan, Path(_small_model()), Path(folder), _print_progress)
    print("\n".join(run.lines(figures)))
    write_json(options.json, run.to_json(figures))
    write_figures(options, host.figures(figures))


def _refuse_up_options(up_options: Sequence[str]) -> None:
    if up_options:
        raise SettingError(f"this measurement does not start `orca up`, which could take {' '.join(up_options)}")


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


ACTIONS: Mapping[str, Callable[[argparse.Namespace, Sequence[str]], int | None]] = {
    "serve": _serve,
    "overload": _overload,
    "sweep": _sweep,
    "homogeneous": _homogeneous,
    "engine": _engine,
    "chunks": _chunks,
    "encoder": _encoder,
    "grammars": _grammars,
    "gpu": gpu.act,
    "peers": _peers,
    "deadlines": deadlines.act,
    "turns": turns.act,
    "plan": plan.act,
    "exegpt": exegpt.act,
    "host": _host,
}
