"""`orca bench peers`: compares Orca with other systems in one run: same machine, model, requests and threads.

Hugging Face transformers always takes part, and OpenVINO GenAI and vLLM if the caller names a Python that has them.
Orca and vLLM take part twice: the engine alone, and the whole system over HTTP.

All requests arrive at once, or each at its own time (`--rate`). In the second case the run compares time to first token
and latency per token, for the systems that accept requests while they run. The systems take turns, so that all of them
are affected when the machine becomes slower or faster. The reference judges every answer before a figure is shown:
speed with wrong tokens does not count.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import orjson
import torch

from orca.bench.peers.comparison import PeerComparison, PeerFailed
from orca.bench.peers.judgement import Judgement
from orca.bench.peers.memory import MemoryWatch
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
from orca.bench.peers.runs import (
    files_of,
    peer_command,
    peer_environment,
    run_engine,
    run_module,
    run_orca,
    run_peer,
    serve_trace,
)
from orca.bench.peers.seq2seq import systems as seq2seq
from orca.bench.peers.workload import PeerAnswer
from orca.bench.system import BenchServer, running_server
from orca.core.domain.errors import SettingError
from orca.core.process.ports import free_port


def check_environments(openvino: Path | None, vllm: Path | None, ctranslate2: Path | None) -> None:
    """Check that the packages of each peer are installed. Raises: SettingError."""
    if find_spec("transformers") is None:
        raise SettingError("`orca bench peers` needs transformers, which is not installed: pip install transformers")
    if openvino is not None and not _has(openvino, "openvino_genai", "optimum", "nncf"):
        raise SettingError(f"--openvino: {openvino} is not a Python with the packages of peers/openvino.txt")
    if vllm is not None and not _has(vllm, "vllm", "torch"):
        raise SettingError(f"--vllm: {vllm} is not a Python with the packages of peers/vllm.txt")
    if ctranslate2 is not None and not _has(ctranslate2, "ctranslate2", "transformers", "torch"):
        raise SettingError(f"--ctranslate2: {ctranslate2} is not a Python with the packages of peers/ctranslate2.txt")


def check_kind(openvino: Path | None, vllm: Path | None, ctranslate2: Path | None, *, is_encoder_decoder: bool) -> None:
    """Check that each peer can run the kind of model. Raises: SettingError."""
    if is_encoder_decoder:
        for name, python in (("openvino", openvino), ("vllm", vllm)):
            if python is not None:
                raise SettingError(f"--{name} is for decoder-only models, and this one is an encoder-decoder model")
    elif ctranslate2 is not None:
        raise SettingError("--ctranslate2 is for encoder-decoder models, and this one is a decoder-only model")


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
        run_module(comparison, str(comparison.openvino), "openvino_peer", "convert", *files_of(comparison, "openvino"))
    if comparison.ctranslate2 is not None:
        report_progress("converting the model to CTranslate2's format")
        seq2seq.convert(comparison)
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
    if comparison.is_encoder_decoder:
        return seq2seq.systems(comparison)
    runs: dict[str, Callable[[PeerComparison], PeerRound]] = {}
    if not (comparison.is_paced or comparison.only_judges):
        runs |= {STATIC: partial(_run_transformers, "static"), CONTINUOUS: partial(_run_transformers, "continuous")}
    if comparison.openvino is not None:
        runs |= {OPENVINO_F32: partial(_run_openvino, "f32"), OPENVINO_DEFAULT: partial(_run_openvino, "default")}
    if comparison.vllm is not None:
        runs |= {VLLM: partial(_run_vllm, "float32"), VLLM_BFLOAT16: partial(_run_vllm, "bfloat16")}
        runs[VLLM_HTTP] = _run_vllm_server
    if comparison.openvino is not None or comparison.vllm is not None:
        runs[ENGINE_BFLOAT16] = partial(run_engine, "bfloat16")
        runs[ORCA_BFLOAT16] = partial(run_orca, ORCA_BFLOAT16, ("--dtype", "bfloat16"))
    return runs | {ENGINE: partial(run_engine, "float32"), ORCA: partial(run_orca, ORCA, ())}


def _run_transformers(mode: str, comparison: PeerComparison) -> PeerRound:
    return run_peer(comparison, sys.executable, "transformers_peer", mode, *files_of(comparison, f"{mode}.json"))


def _run_openvino(precision: str, comparison: PeerComparison) -> PeerRound:
    files = files_of(comparison, "openvino", "openvino.json")
    return run_peer(comparison, str(comparison.openvino), "openvino_peer", precision, *files)


def _run_vllm(dtype: str, comparison: PeerComparison) -> PeerRound:
    return run_peer(comparison, str(comparison.vllm), "vllm_peer", dtype, *files_of(comparison, "vllm.json"))


def _run_vllm_server(comparison: PeerComparison) -> PeerRound:
    watch, port = MemoryWatch(), free_port()
    server = BenchServer(
        name="vLLM's server",
        command=peer_command(str(comparison.vllm), "vllm_peer", "serve", *files_of(comparison), str(port)),
        port=port,
        log=comparison.folder / "vllm.log",
        vocab_size=comparison.vocab_size,
        environment=peer_environment(comparison),
    )
    system = running_server(server, on_start=watch.follow)
    return asyncio.run(serve_trace(comparison, VLLM_HTTP, system, watch, server.log))


def _check_lengths(comparison: PeerComparison, result: PeerResult) -> None:
    wanted = comparison.workload.new_tokens
    if any([len(tokens) for tokens in answer] != wanted for answer in result.answers):
        raise PeerFailed(f"{result.name}: the answers do not have the requested numbers of tokens")


def _judge_all(comparison: PeerComparison, result: PeerResult) -> None:
    known: dict[bytes, Judgement] = {}
    judge = seq2seq.TRANSFORMERS_PEER if comparison.is_encoder_decoder else "transformers_peer"
    for answer in result.answers:
        key = orjson.dumps(answer)
        if key not in known:
            given, verdict = comparison.folder / "given.json", comparison.folder / "judgement.json"
            PeerAnswer(seconds=0.0, tokens=answer).save(given)
            files = files_of(comparison, verdict.name, given.name)
            run_module(comparison, sys.executable, judge, "judge", *files)
            known[key] = Judgement(**orjson.loads(verdict.read_bytes()))
        if not known[key].is_right:
            raise PeerFailed(f"{result.name}: {known[key]}")
        result.judgements.append(known[key])
