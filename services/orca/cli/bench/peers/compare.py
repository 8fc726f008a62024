"""Orca beside other systems in one run on one machine: same model, same requests, same number of threads.

Hugging Face transformers is always there; OpenVINO GenAI where the caller names the Python that has it. Of Orca there
are two: its engine and policy alone, and the whole system over HTTP.

The systems take turns, so that a machine that becomes slower or faster during the run does so for all of them. Every
answer is judged by the reference before a figure is given: speed without the right tokens is no speed.
"""

import asyncio
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import orjson

import orca
from orca.cli.bench.client import run_trace
from orca.cli.bench.peers.judgement import Judgement
from orca.cli.bench.peers.model import LlamaShape, make_model
from orca.cli.bench.peers.workload import Answer, Workload
from orca.cli.bench.report import summarise
from orca.cli.bench.system import running_system
from orca.cli.bench.trace import Range, Trace, TraceSpec, generate
from orca.core.errors import OrcaError, SettingError
from orca.core.leash import leashed

STATIC, CONTINUOUS = "transformers static", "transformers continuous"
OPENVINO_F32, OPENVINO_DEFAULT = "openvino f32", "openvino default"
ENGINE, ENGINE_BFLOAT16, ORCA = "orca engine", "orca engine bfloat16", "orca over HTTP"
NOT_JUDGED = {
    OPENVINO_DEFAULT: "lengths only: computes in bfloat16, cache of 8 bits",
    ENGINE_BFLOAT16: "lengths only: computes in bfloat16",
}
"""What is no float32, and so has other tokens with good reason."""


class PeerFailed(OrcaError):
    """A system ended with an error or gave wrong tokens: there is no figure to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What is compared, and how."""

    model: Path
    vocab_size: int
    trace: Trace  # all requests at 0
    batch_size: int
    threads: int  # of computation, in all
    rounds: int
    up_options: Sequence[str]  # for `orca up`, besides the model
    folder: Path  # for what passes between the processes, and their logs
    openvino: Path | None = None  # a Python that has openvino-genai

    @property
    def workload(self) -> Workload:
        return Workload.of(self.trace, self.model, self.vocab_size, batch_size=self.batch_size, threads=self.threads)

    @property
    def environment(self) -> dict[str, str]:
        count = str(self.threads)
        return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}


@dataclass(slots=True)
class Standing:
    """What one system did, a value per round."""

    name: str
    tokens_per_s: list[float] = field(default_factory=list)
    answers: list[list[list[int]]] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    shares_of_limit: list[float] = field(default_factory=list)  # of the engine: time of its matrix products alone

    @property
    def median_tokens_per_s(self) -> float:
        return median(self.tokens_per_s)


def check_environments(openvino: Path | None) -> None:
    """Raises: SettingError where what a peer needs is not installed."""
    if find_spec("transformers") is None:
        raise SettingError(
            "`orca bench peers` compares with transformers, which is not installed: pip install transformers"
        )
    if openvino is not None and not _has_openvino(openvino):
        raise SettingError(f"--openvino: {openvino} is no Python that has what peers/openvino.txt lists")


def _has_openvino(python: Path) -> bool:
    question = "import sys; from importlib.util import find_spec; print(None not in map(find_spec, sys.argv[1:]))"
    command = [str(python), "-c", question, "openvino_genai", "optimum", "nncf"]
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    except OSError:  # no program, though it may be executed
        return False
    return answer == b"True\n"


def made_model(folder: Path, say: Callable[[str], None]) -> Path:
    """A llama-type model of 63 M random parameters, made in `folder`."""
    model = folder / "llama-63m"
    say(f"made a model of {make_model(model, LlamaShape()) / 1e6:.0f} M parameters")
    return model


def up_options(batch_size: int, threads: int, more: Sequence[str]) -> list[str]:
    """What `orca up` gets: one stage with all threads, float32 as the peers, then the caller's own."""
    chosen = {"--stages": "1", "--max-batch-size": str(batch_size), "--threads": str(threads), "--dtype": "float32"}
    return [part for name, value in chosen.items() if name not in more for part in (name, value)] + list(more)


def compare(contest: Contest, say: Callable[[str], None]) -> list[Standing]:
    """Run all rounds and judge all answers.

    Returns: the peers, then the engine, then the whole system.
    Raises: PeerFailed when a system fails or gives wrong tokens.
    """
    contest.workload.save(contest.folder / "workload.json")
    runs: dict[str, Callable[[Contest], Answer]] = {STATIC: _run_static, CONTINUOUS: _run_continuous}
    if contest.openvino is not None:
        runs |= {OPENVINO_F32: partial(_run_openvino, "f32"), OPENVINO_DEFAULT: partial(_run_openvino, "default")}
        runs[ENGINE_BFLOAT16] = partial(_run_engine, "bfloat16")
    runs |= {ENGINE: partial(_run_engine, "float32"), ORCA: _run_orca}
    standings = [Standing(name) for name in runs]
    for number in range(1, contest.rounds + 1):
        for standing in standings:
            answer = runs[standing.name](contest)
            standing.tokens_per_s.append(contest.trace.new_tokens / answer.seconds)
            standing.answers.append(answer.tokens)
            if answer.limit_seconds is not None:
                standing.shares_of_limit.append(answer.limit_seconds / answer.seconds)
            say(f"round {number}: {standing.name:<24}{standing.tokens_per_s[-1]:>9.1f} tokens/s")
    for standing in standings:
        say(f"judging the tokens of {standing.name}")
        if standing.name in NOT_JUDGED:
            _check_lengths(contest, standing)
        else:
            _judge_all(contest, standing)
    return standings


def _run_static(contest: Contest) -> Answer:
    answer = contest.folder / "static.json"
    _transformers(contest, "static", answer)
    return Answer.load(answer)


def _run_continuous(contest: Contest) -> Answer:
    answer = contest.folder / "continuous.json"
    _transformers(contest, "continuous", answer)
    return Answer.load(answer)


def _transformers(contest: Contest, mode: str, answer: Path, *more: Path) -> None:
    files = [contest.folder / "workload.json", answer, *more]
    _run_module(contest, sys.executable, "transformers_peer", mode, *map(str, files))


def _run_openvino(precision: str, contest: Contest) -> Answer:
    answer, workload = contest.folder / "openvino.json", contest.folder / "workload.json"
    words = (precision, str(workload), str(answer), str(contest.folder / "openvino"))
    _run_module(contest, str(contest.openvino), "openvino_peer", *words)
    return Answer.load(answer)


def _run_engine(dtype: str, contest: Contest) -> Answer:
    answer = contest.folder / "engine.json"
    _run_module(contest, sys.executable, "engine_peer", dtype, str(contest.folder / "workload.json"), str(answer))
    return Answer.load(answer)


def _run_module(contest: Contest, python: str, module: str, *words: str) -> None:
    """A module of this package as a process of its own. Raises: PeerFailed with the last of what it said."""
    # Another environment has no Orca: it finds the sources of this one.
    roots = os.pathsep.join(dict.fromkeys(str(Path(folder).parent) for folder in orca.__path__))
    ended = subprocess.run(
        leashed([python, "-m", f"orca.cli.bench.peers.{module}", *words]),
        env={**os.environ, **contest.environment, "PYTHONPATH": roots},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise PeerFailed(f"{module} {words[0]} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")


def _run_orca(contest: Contest) -> Answer:
    async def run() -> Answer:
        async with running_system(
            str(contest.model),
            contest.up_options,
            contest.folder,
            vocab_size=contest.vocab_size,
            environment=contest.environment,
        ) as target:
            await run_trace(target, _warm_up(contest))
            outcomes = await run_trace(target, contest.trace)
        report = summarise(outcomes)
        if report.errors:
            raise PeerFailed(f"orca: {report.errors}; its logs are in {contest.folder}")
        return Answer(seconds=report.duration_s, tokens=[list(outcome.token_ids) for outcome in outcomes])

    return asyncio.run(run())


def _warm_up(contest: Contest) -> Trace:
    """Two batches of four tokens each, as the peers get."""
    lengths = contest.trace.spec.prompt_tokens
    return generate(
        TraceSpec(requests=2 * contest.batch_size, prompt_tokens=lengths, new_tokens=Range(4, 4), seed=1_000_003)
    )


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
            _transformers(contest, "judge", verdict, given)
            known[key] = Judgement(**orjson.loads(verdict.read_bytes()))
        if not known[key].is_right:
            raise PeerFailed(f"{standing.name}: {known[key]}")
        standing.judgements.append(known[key])


def lines(standings: Sequence[Standing]) -> list[str]:
    """The table: median and spread of generated tokens/s, ratios, and what the reference says of the tokens."""
    *others, ours = standings
    rows = [f"{'generated tokens/s':<26}{'median':>9}{'lowest':>9}{'highest':>9}{'orca is':>10}  tokens"]
    for standing in standings:
        speeds = standing.tokens_per_s
        ratio = f"{ours.median_tokens_per_s / standing.median_tokens_per_s:.2f} x" if standing is not ours else ""
        rows.append(
            f"{standing.name:<26}{standing.median_tokens_per_s:>9.1f}{min(speeds):>9.1f}{max(speeds):>9.1f}"
            f"{ratio:>10}  {NOT_JUDGED.get(standing.name) or standing.judgements[-1]}"
        )
    for standing in standings:
        if standing.shares_of_limit:
            share = median(standing.shares_of_limit)
            rows.append(f"{standing.name}: {share:.0%} of the speed that its matrix products have alone")
    for other in others:
        same = sum(a == b for a, b in zip(ours.answers[-1], other.answers[-1], strict=True))
        rows.append(f"{same} of {len(ours.answers[-1])} requests: the same tokens from orca and {other.name}")
    return rows


def to_json(contest: Contest, standings: Sequence[Standing]) -> dict[str, Any]:
    """Figures and all that they depend on, as plain data."""
    *_, ours = standings
    spec = contest.trace.spec
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "threads": contest.threads,
        "batch_size": contest.batch_size,
        "requests": spec.requests,
        "prompt_tokens": str(spec.prompt_tokens),
        "new_tokens": str(spec.new_tokens),
        "generated_tokens": contest.trace.new_tokens,
        "seed": spec.seed,
        "orca_up": list(contest.up_options),
        "systems": [
            {
                "name": standing.name,
                "tokens_per_s": standing.tokens_per_s,
                "median_tokens_per_s": standing.median_tokens_per_s,
                "orca_is_times_as_fast": ours.median_tokens_per_s / standing.median_tokens_per_s,
                "shares_of_limit": standing.shares_of_limit,
                "judgements": [judgement.to_json() for judgement in standing.judgements],
            }
            for standing in standings
        ],
    }
