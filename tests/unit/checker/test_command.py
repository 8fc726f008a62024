"""The command: it says its seed first, judges what was kept (real runs: test_real_runs.py)."""

from pathlib import Path

import httpx
import pytest

from checker.__main__ import main
from checker.clients.workload import PlannedCall, chain, plan_calls, seq2seq_chain
from checker.history.records import Event, HistoryWriter, Record
from checker.oracles.chain_model import make_chain_model
from checker.oracles.chain_oracle import expected_tokens
from checker.oracles.expectations import chain_expectations, undisturbed_expectations
from checker.oracles.seq2seq_chain_model import make_seq2seq_chain_model
from checker.oracles.seq2seq_chain_oracle import expected_answer
from checker.systems.resources import read_resources
from checker.systems.system import System
from support.checker.fake_pool import pool
from support.checker.history_builders import good_call, good_history


def keep(folder: Path, records: list[Record]) -> str:
    with HistoryWriter(folder / "history.jsonl") as history:
        for record in records:
            history.add(record)
    return str(folder / "history.jsonl")


def test_judging_a_good_history_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", keep(tmp_path, good_history(good_call()))]) == 0
    assert "seed 7: 2 requests, 7 tokens" in capsys.readouterr().out


def test_judging_a_corrupted_history_reports_the_violation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record for record in good_call() if not (isinstance(record, Event) and record.id == "0.1")]
    assert main(["judge", keep(tmp_path, good_history(records))]) == 1
    assert "index_rises c0.0: skipped; expected token 1 on connection 0; found token 2" in capsys.readouterr().out


def test_faults_of_absent_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kills", "--faults", "rank,operator"])
    assert "unknown: operator; known: gateway" in capsys.readouterr().err


def test_a_share_of_deadlines_is_a_number_from_0_to_1(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("half", "1.5", "nan"):
        with pytest.raises(SystemExit):
            main(["kills", "--deadlines", text])
        assert f"{text} is not a number from 0 to 1" in capsys.readouterr().err


def test_expected_outputs_of_a_chain_model_respect_seeds_and_stops(tmp_path: Path) -> None:
    model = make_chain_model(tmp_path, seed=3)
    body = {"prompt": [1, 2], "max_tokens": 6, "n": 2, "seed": 9, "temperature": 1.0}
    plan = PlannedCall(name="c0", due_s=0.0, path="/v1/completions", body=body)
    first, second = chain_expectations(tmp_path, [plan], at=0.0)
    assert list(first.tokens) == expected_tokens(model, [1, 2], 6, seed=9, temperature=1.0)
    assert list(second.tokens) == expected_tokens(model, [1, 2], 6, seed=10, temperature=1.0)
    assert second.finish_reason == "length"
    stopped = PlannedCall(name="c0", due_s=0.0, path="", body=body | {"n": 1, "stop": [f"<{first.tokens[2]}>"]})
    [cut] = chain_expectations(tmp_path, [stopped], at=0.0)
    assert (cut.tokens, cut.finish_reason) == (first.tokens[:3], "stop")


def test_every_planned_shape_has_an_expected_output_of_a_chain(tmp_path: Path) -> None:
    make_chain_model(tmp_path, vocab_size=100)
    plans = plan_calls(chain("m", 100), seed=1, count=40, rate=1.0, max_tokens=(1, 8), drops=True)
    found = chain_expectations(tmp_path, plans, at=0.0)
    assert {expected.call for expected in found} == {plan.name for plan in plans if plan.intent == "finish"}


def test_expected_answers_of_an_encoder_decoder_chain_respect_prefixes(tmp_path: Path) -> None:
    model = make_seq2seq_chain_model(tmp_path, seed=3)
    body = {"prompt": "<1><2>", "max_tokens": 6, "n": 2, "seed": 9, "temperature": 1.0}

    def expected(prefix: object) -> list[list[int]]:
        call = PlannedCall(name="c0", due_s=0.0, path="/v1/completions", body=body | {"decoder_prefix": prefix})
        return [list(found.tokens) for found in chain_expectations(tmp_path, [call], at=0.0)]

    def answers(*prefix: int) -> list[list[int]]:
        return [expected_answer(model, [1, 2], 6, seed=seed, temperature=1.0, prefix=prefix) for seed in (9, 10)]

    assert expected(None) == expected([]) == expected([0]) == answers() == answers(0)
    assert expected([7, 8]) == expected("<7><8>") == expected([0, 7, 8]) == answers(7, 8) != answers()


def test_every_planned_shape_has_an_expected_output_of_an_encoder_decoder_chain(tmp_path: Path) -> None:
    make_seq2seq_chain_model(tmp_path, vocab_size=100)
    source = seq2seq_chain("m", 100, 0)
    plans = plan_calls(source, seed=1, count=60, rate=1.0, max_tokens=(1, 8), drops=True)
    prefixes = [plan.body["decoder_prefix"] for plan in plans if "decoder_prefix" in plan.body]
    assert {type(prefix) for prefix in prefixes} == {list, str}
    assert len(prefixes) < len(plans) / 2
    found = chain_expectations(tmp_path, plans, at=0.0)
    assert {expected.call for expected in found} == {plan.name for plan in plans if plan.intent == "finish"}


def test_a_model_and_a_kind_of_new_model_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kills", "--model", "somewhere", "--model-kind", "encoder-decoder"])
    assert "not allowed with argument --model" in capsys.readouterr().err


async def test_an_undisturbed_run_gives_the_expected_answers_of_the_system(tmp_path: Path) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        choice = {"index": 0, "text": "ab", "finish_reason": "length", "stop_reason": None, "token_ids": [4, 5]}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        body = {"id": "cmpl-1", "choices": [choice], "usage": usage}
        return httpx.Response(200, headers={"x-request-id": "cmpl-1"}, json=body)

    plan = PlannedCall(name="c7", due_s=5.0, path="/v1/completions", body={"prompt": [1], "stream": True})
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        [expected] = await undisturbed_expectations("http://one", http, [plan], tmp_path, seed=1, at=2.0)
    assert (expected.call, expected.tokens, expected.finish_reason) == ("c7", (4, 5), "length")


class Standing(System):
    """A system that is not there: only what is asked of its output and its processes."""

    @property
    def output(self) -> str:
        return "\nReady: m at http://one (float32)\n  gateway  12  one:80\n  scheduler-0  13  http://two/metrics\n"

    def parts(self) -> dict[str, object]:  # type: ignore[override]
        return {}


async def test_held_resources_are_read_from_metrics_and_redis(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        gauge = "orca_open_generations" if request.url.host == "one" else 'orca_num_requests_running{group="g"}'
        return httpx.Response(200, text=f"# HELP x\n{gauge} 3.0\norca_other 1.0\n")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        held = await read_resources("before", Standing(tmp_path, ()), http, pool(keys=("orca:{local}:log:a",)))
    assert held is not None
    assert held.held == {
        "keys log": 1.0,
        "orca_open_generations gateway": 3.0,
        "orca_num_requests_running scheduler-0": 3.0,
    }


async def test_held_resources_are_unknown_while_a_part_is_unreachable(tmp_path: Path) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("away")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        assert await read_resources("before", Standing(tmp_path, ()), http, pool()) is None
