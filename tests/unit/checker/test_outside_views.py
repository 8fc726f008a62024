"""The checker reads a system from outside: logs, Redis, events."""

import re
from pathlib import Path

import pytest

from checker.clients.sse import EventParser, RawEvent
from checker.history.records import Claimed, GroupNews, Opening, Ran
from checker.history.system_logs import read_deaths, read_iterations, read_logs
from checker.systems.pool_reader import LASTING, PREFIX, count_keys, read_log
from orca.core.domain.request import Logprob, Token
from orca.pool.codec import pack_token
from orca.pool.redis import keys
from support.checker.fake_pool import pool


def test_logs_become_claims_and_news_in_the_checkers_time(tmp_path: Path) -> None:
    lines = [
        '{"time":"1970-01-01T00:16:50.500000Z","message":"epoch over","epoch":1,"reason":"a rank died"}',
        '{"time":"1970-01-01T00:16:50.000000Z","message":"request claimed","request_id":"x.0","claim":1,"logged":4}',
        '{"time":"1970-01-01T00:16:51.000000Z","message":"something else"}',
        '{"time":"1970-01-01T00:16:5',
    ]
    (tmp_path / "scheduler-0.log").write_text("\n".join(lines))
    (tmp_path / "gateway.log").write_text(
        '{"time":"1970-01-01T00:16:52.000000Z","message":"pool away, streams wait: ConnectionError"}\n'
    )
    found = read_logs(tmp_path, Opening(at=100.0, seed=1, wall_s=1000.0))
    assert found == [
        Claimed(at=110.0, request="x.0", claim=1, logged=4),
        GroupNews(at=110.5, group="scheduler-0", what="over", epoch=1, reason="a rank died"),
        GroupNews(at=112.0, group="gateway", what="away"),
    ]


def test_the_error_that_broke_an_epoch_is_the_last_line_of_its_traceback(tmp_path: Path) -> None:
    line = '{"time":"1970-01-01T00:16:50.000000Z","message":"the epoch broke","epoch":4,"exception_text":'
    (tmp_path / "worker-0.1.log").write_text(line + r'"Traceback\n  File\nEngineError: request 3 is gone\n"}')
    assert read_logs(tmp_path, Opening(at=100.0, seed=1, wall_s=1000.0)) == [
        GroupNews(at=110.0, group="worker-0.1", what="broke", epoch=4, reason="EngineError: request 3 is gone")
    ]


def test_deaths_are_read_from_the_output_of_orca_up() -> None:
    said = "1970-01-01T00:16:51.250Z redis was killed by SIGKILL; its log is x\n    a line\nrestarting redis\n"
    assert read_deaths(said, Opening(at=100.0, seed=1, wall_s=1000.0)) == [
        GroupNews(at=111.25, group="redis", what="death", reason="was killed by SIGKILL")
    ]


def test_iterations_count_since_a_time_and_a_truncated_line_is_skipped(tmp_path: Path) -> None:
    rows = '"rows":[["b.0","increment",3,1],["a.0","initiation",0,3]]'
    lines = [
        '{"submitted_ns":1,"rows":[["old.0","increment",1,1]]}',
        '{"submitted_ns":9000000000,' + rows + "}",
        '{"rows":[["c',
    ]
    (tmp_path / "scheduler-0.jsonl").write_text("\n".join(lines))
    assert read_iterations(tmp_path, since=5.0, at=9.0) == Ran(at=9.0, requests=("a.0", "b.0"))


END = {b"end": b"length", b"count": b"2"}


async def test_a_log_is_read_with_its_end_and_both_forms_of_tokens() -> None:
    packed = b"L" + (300).to_bytes(4, "little") + b"\0"
    signed = {b"token": packed, b"claim": b"3"}
    log = await read_log(pool((b"1-0", {b"token": b"17"}), (b"2-0", signed), (b"3-0", END)), "x.0", at=1.0)
    assert log is not None
    assert log.claims == (3,)
    assert (log.tokens, log.reason, log.count, log.is_dense) == ((17, 300), "length", 2, True)


@pytest.mark.parametrize("logprob", [None, Logprob(300, -0.5)])
@pytest.mark.parametrize("cached", [None, 0, 48])
async def test_a_token_is_read_in_each_form_that_the_pool_writes(logprob: Logprob | None, cached: int | None) -> None:
    packed = pack_token(Token(300, logprob, cached_prompt_tokens=cached))
    log = await read_log(pool((b"1-0", {b"token": packed})), "x.0", at=1.0)
    assert log is not None
    assert log.tokens == (300,)


async def test_a_gap_in_a_log_and_a_token_after_its_end_are_violations() -> None:
    gap = await read_log(pool((b"1-0", {b"token": b"17"}), (b"3-0", END)), "x.0", at=1.0)
    behind = await read_log(pool((b"1-0", END), (b"2-0", {b"token": b"17"})), "x.0", at=1.0)
    assert gap is not None
    assert behind is not None
    assert (gap.is_dense, behind.is_dense) == (False, False)
    assert await read_log(pool(), "x.0", at=1.0) is None


async def test_keys_are_counted_by_kind_without_permanent_ones() -> None:
    keys = tuple(PREFIX + name for name in ("meta", "seat:g", "log:a", "log:b", "watch"))
    assert await count_keys(pool(keys=keys)) == {"keys log": 2.0, "keys watch": 1.0}


def test_events_are_split_at_any_byte() -> None:
    parser, found = EventParser(), []
    for byte in b"id: 0.1\ndata: a\n\ndata: [DONE]\n\ndata: never whole":
        found += parser.feed(bytes([byte]))
    assert found == [RawEvent("0.1", "a"), RawEvent(None, "[DONE]")]


def test_a_comment_is_no_event() -> None:
    assert EventParser().feed(b": waiting\n\ndata: a\n\n: waiting\n\nid: 0.1\ndata: b\n\n") == [
        RawEvent(None, "a"),
        RawEvent("0.1", "b"),
    ]


def test_only_keys_that_the_pool_keeps_beyond_all_requests_may_stay() -> None:
    rows = re.findall(r"^(\w+)(?::<\w+>)? +(?:hash|string|zset|set|stream) .*  (.+)$", keys.__doc__ or "", re.MULTILINE)
    lasting = {
        kind
        for kind, lifetime in rows
        if lifetime.startswith(
            ("for ever", "while the lease lives", "a day", "a minute", "an hour", "four hours", "until its records")
        )
    }
    assert lasting == LASTING
