"""Keys in a file: what a line may be, what a changed file does, and the limits of each key."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca.core.api_keys import KEYS_MAX, ApiKey, KeyFileError, KeyLimits, key_digest, key_line, make_key, parse_keys
from orca.core.domain.errors import SettingError
from orca.gateway.limits.auth import check_access
from orca.gateway.limits.key_ring import READING_LEAST, KeyRing, TokenBucket
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import Rig, error_of, rig, until

LIMIT = st.none() | st.integers(1, 100)
HASH = "sha256:" + "0" * 64
PRIORITY_RULE = "most_urgent_priority must occur once and be a whole number from -8 to 8"
BAD_PRIORITIES = ("-9", "9", "10", "1.5", "+1", "x", "", "-", "٣", "1 most_urgent_priority=1")


def settings_with(file: Path, **fields: Any) -> GatewaySettings:
    return GatewaySettings(model="tiny", api_keys_file=str(file), **fields)


def write(file: Path, *keys: tuple[str, str], **limits: int) -> Path:
    file.write_text("".join(key_line(ApiKey(name, key_digest(key), KeyLimits(**limits))) + "\n" for name, key in keys))
    return file


def swap(link: Path, target: Path) -> None:
    """Replace the file as Kubernetes updates a mounted Secret."""
    new = link.with_name("..new")
    new.symlink_to(target)
    new.replace(link)


async def call(one: Rig, key: str) -> httpx.Response:
    return await one.client.post("/tokenize", json={"prompt": "a"}, headers={"authorization": f"Bearer {key}"})


@given(
    limits=st.builds(
        KeyLimits,
        requests_per_minute=LIMIT,
        calls=LIMIT,
        queue_percent=LIMIT,
        most_urgent_priority=st.none() | st.integers(-8, 8),
    )
)
def test_a_line_reads_back_as_it_was_written(limits: KeyLimits) -> None:
    key = ApiKey("team-a.1", key_digest(make_key()), limits)
    assert parse_keys(f"# who may call\n\n  {key_line(key)}  # since May\n") == (key,)


def test_a_line_that_the_release_before_wrote_is_read() -> None:
    [key] = parse_keys(f"team-a.1: {HASH} requests_per_minute=60 calls=4 queue_percent=50\n")
    assert key.limits == KeyLimits(requests_per_minute=60, calls=4, queue_percent=50)
    assert key.limits.priority_bound == 0


def test_a_key_without_a_bound_of_priority_has_a_line_that_the_release_before_reads() -> None:
    assert key_line(ApiKey("alice", bytes(32), KeyLimits(calls=4))) == f"alice: {HASH} calls=4"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("orca-secret", "line 1: is not `name: sha256"),
        ("alice: orca-secret", "line 1: is not `name: sha256"),
        (f"\nalice {HASH}", "line 2: is not `name: sha256"),
        (f"al/ice: {HASH}", "line 1: is not `name: sha256"),
        (f"{'a' * 65}: {HASH}", "line 1: is not `name: sha256"),
        (f"alice: {HASH[:-1]}", "line 1: is not `name: sha256"),
        (
            f"alice: {HASH} orca-secret=5",
            "line 1: has an unknown limit; the limits are calls, most_urgent_priority, queue_",
        ),
        (f"alice: {HASH} calls=0", "line 1: calls must occur once and be a whole number of 1 or more"),
        (f"alice: {HASH} calls=orca-secret", "line 1: calls must occur once and be a whole number of 1 or more"),
        (f"alice: {HASH} calls=1 calls=2", "line 1: calls must occur once"),
        (f"alice: {HASH} queue_percent=101", "line 1: queue_percent must be 100 or less"),
        *((f"alice: {HASH} most_urgent_priority={bad}", f"line 1: {PRIORITY_RULE}") for bad in BAD_PRIORITIES),
        (f"alice: {HASH}\nalice: {HASH}", "the name alice occurs twice"),
        (f"alice: {HASH}\nbob: {HASH}", "one key has two names"),
        ("".join(f"n{i}: sha256:{i:064x}\n" for i in range(KEYS_MAX + 1)), f"more than {KEYS_MAX} keys"),
    ],
)
def test_an_invalid_line_is_reported_by_number_without_its_content(text: str, problem: str) -> None:
    with pytest.raises(KeyFileError) as refused:
        parse_keys(text)
    assert str(refused.value).startswith(problem)
    assert "secret" not in str(refused.value)


async def test_keys_of_a_file_are_accepted_beside_those_of_the_setting(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", ("alice", "a"), ("bob", "b"))
    async with rig(schedules=False, settings=settings_with(file, api_keys=("c",))) as one:
        assert [(await call(one, key)).status_code for key in "abcd"] == [200, 200, 200, 401]


async def test_a_changed_file_takes_effect_at_once_also_through_a_replaced_symlink(tmp_path: Path) -> None:
    link = tmp_path / "keys"
    swap(link, write(tmp_path / "first", ("alice", "a")))
    async with rig(schedules=False, settings=settings_with(link)) as one:
        swap(link, write(tmp_path / "second", ("alice", "b")))
        await one.app.state.gateway.keys.reload()
        assert [(await call(one, key)).status_code for key in "ab"] == [401, 200]


async def test_a_running_gateway_polls_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", ("alice", "a"))
    async with rig(schedules=False, settings=settings_with(file)) as one:
        write(file, ("alice", "a"), ("bob", "b"))
        await until(lambda: one.app.state.gateway.keys.names == ("alice", "bob"))


class Threads(ThreadPoolExecutor):
    """Has none to give until told otherwise."""

    has_none = True

    def submit(self, *call: Any, **named: Any) -> Any:
        if self.has_none:
            raise RuntimeError("can't start new thread")
        return super().submit(*call, **named)


async def test_polling_continues_after_an_unexpected_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads = Threads()
    asyncio.get_running_loop().set_default_executor(threads)
    keys = KeyRing(settings_with(write(tmp_path / "keys", ("alice", "a"))))
    looking = asyncio.create_task(keys.run())
    await until(lambda: keys.is_file_broken)
    assert "checking the file of API keys failed" in caplog.text
    threads.has_none = False
    write(tmp_path / "keys", ("bob", "b"))
    await until(lambda: keys.find("b"))
    assert not keys.is_file_broken
    looking.cancel()


@pytest.mark.parametrize("spoil", ["alice: nonsense", b"\xff\xfe", "x" * ((1 << 20) + 1), None])
async def test_a_broken_file_keeps_the_old_keys_and_is_reported(
    spoil: str | bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "keys", ("alice", "a"))
    async with rig(schedules=False, settings=settings_with(file)) as one:
        file.unlink()
        if spoil is not None:
            file.write_bytes(spoil.encode() if isinstance(spoil, str) else spoil)
        await one.app.state.gateway.keys.reload()
        assert (await call(one, "a")).status_code == 200
        assert "the old keys stay valid" in caplog.text
        assert "orca_api_keys_file_broken 1.0" in (await one.client.get("/metrics")).text
        write(file, ("bob", "b"))
        await one.app.state.gateway.keys.reload()
        assert [(await call(one, key)).status_code for key in "ab"] == [401, 200]
        assert "orca_api_keys_file_broken 0.0" in (await one.client.get("/metrics")).text


async def test_an_empty_file_refuses_all_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "keys", ("alice", "a"))
    async with rig(schedules=False, settings=settings_with(file)) as one:
        file.write_text("# nobody\n")
        await one.app.state.gateway.keys.reload()
        assert error_of(await call(one, "a"))[1]["code"] == "invalid_api_key"
        assert (await one.client.get("/v1/models")).status_code == 401
        assert "every call is refused" in caplog.text


@pytest.mark.parametrize("content", ["alice: nonsense", None])
def test_a_file_that_is_broken_at_the_start_stops_it(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingError, match=r"setting api_keys_file: .*keys: "):
        KeyRing(settings_with(file))


async def test_a_key_has_a_bound_of_requests_per_minute_and_gets_it_in_headers(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", ("alice", "a"), requests_per_minute=2)
    async with rig(schedules=False, settings=settings_with(file)) as one:
        first, second, third = [await call(one, "a") for _ in range(3)]
        told = [response.headers["x-ratelimit-remaining-requests"] for response in (first, second, third)]
        assert (told, first.headers["x-ratelimit-limit-requests"]) == (["1", "0", "0"], "2")
        assert first.headers["x-ratelimit-reset-requests"] == "30s"
        assert (error_of(third)[0], error_of(third)[1]["code"]) == (429, "rate_limit_exceeded")
        assert 25 <= int(third.headers["retry-after"]) <= 30
        metrics = (await one.client.get("/metrics")).text
        assert 'orca_api_key_requests_total{key="alice",status="200"} 2.0' in metrics
        assert 'orca_api_key_requests_total{key="alice",status="429"} 1.0' in metrics


async def test_an_internal_error_counts_among_the_answers_to_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    file = write(tmp_path / "keys", ("alice", "a"))
    async with rig(schedules=False, settings=settings_with(file)) as one:
        monkeypatch.setattr(one.pool, "submit", broken)
        keyed = {"authorization": "Bearer a"}
        assert (await one.client.post("/v1/completions", json={"prompt": "a"}, headers=keyed)).status_code == 500
        assert 'orca_api_key_requests_total{key="alice",status="500"} 1.0' in (await one.client.get("/metrics")).text


async def test_a_call_counts_for_the_rate_of_its_key_with_all_its_requests(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", ("alice", "a"), requests_per_minute=10)
    keyed = {"authorization": "Bearer a"}
    async with rig(settings=settings_with(file)) as one:

        async def complete(**body: Any) -> httpx.Response:
            return await one.client.post("/v1/completions", json={"max_tokens": 1, **body}, headers=keyed)

        first = await complete(prompt=["a", "b", "c"], n=2)
        assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "4")
        second = await complete(prompt=["a"] * 6)
        assert (error_of(second)[0], error_of(second)[1]["code"]) == (429, "rate_limit_exceeded")
        # The second has cost one for itself: 3 are left, and it needs 6.
        assert 15 <= int(second.headers["retry-after"]) <= 18
        message = error_of(second)[1]["message"]
        assert message.startswith("Rate limit reached for requests per minute with this key: Limit 10. ")
        assert message.endswith(f"Please try again in {second.headers['retry-after']}s.")
        never = await complete(prompt="a", n=11, background=True)
        assert (error_of(never)[0], error_of(never)[1]["code"]) == (400, "too_many_requests_in_call")
        assert error_of(never)[1]["param"] == "n"
        assert len(one.pool.state.records) == 6


async def test_a_repeated_call_is_answered_even_if_its_key_has_no_rate_left(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", ("alice", "a"), requests_per_minute=4)
    keyed = {"authorization": "Bearer a", "idempotency-key": "k"}
    async with rig(settings=settings_with(file)) as one:
        body = {"prompt": "a", "n": 3, "max_tokens": 1}
        answers = [await one.client.post("/v1/completions", json=body, headers=keyed) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(one.pool.state.records) == 3


async def test_a_key_can_read_and_cancel_its_requests_when_its_limits_are_used_up(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", ("alice", "a"), requests_per_minute=1, calls=1)
    async with rig(schedules=False, settings=settings_with(file)) as one:
        keyed = {"authorization": "Bearer a"}
        running = asyncio.create_task(one.client.post("/v1/completions", json={"prompt": "a"}, headers=keyed))
        await until(lambda: len(one.pool.state.parents) == 1)
        [parent] = one.pool.state.parents
        assert (await call(one, "a")).status_code == 429
        for method in ("GET", "DELETE"):
            answer = await one.client.request(method, f"/v1/requests/{parent}", headers=keyed)
            assert answer.status_code == 200
        assert (await running).status_code == 409  # cancelled


def test_calls_that_resume_a_stream_have_their_own_bound(tmp_path: Path) -> None:
    keys = KeyRing(settings_with(write(tmp_path / "keys", ("alice", "a"), calls=1)))
    key = keys.find("a")
    assert key is not None
    for _ in range(READING_LEAST):
        keys.enter(key, makes_work=False)
    with pytest.raises(Exception, match=f"more than {READING_LEAST} reading calls at a time"):
        keys.enter(key, makes_work=False)
    keys.enter(key)


async def test_a_key_without_a_rate_gets_no_rate_headers() -> None:
    async with rig(schedules=False, settings=GatewaySettings(model="tiny", api_keys=("a",))) as one:
        assert not [name for name in (await call(one, "a")).headers if name.startswith("x-ratelimit")]


async def test_changed_limits_of_a_key_start_again_and_unchanged_ones_continue(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", ("alice", "a"), requests_per_minute=1)
    async with rig(schedules=False, settings=settings_with(file)) as one:
        await call(one, "a")
        write(file, ("alice", "a"), ("bob", "b"), requests_per_minute=1)
        await one.app.state.gateway.keys.reload()
        assert (await call(one, "a")).status_code == 429
        write(file, ("alice", "a"), requests_per_minute=5)
        await one.app.state.gateway.keys.reload()
        assert (await call(one, "a")).status_code == 200


def test_a_line_of_the_file_overrides_the_setting_for_concurrent_calls(tmp_path: Path) -> None:
    keys = KeyRing(settings_with(write(tmp_path / "keys", ("alice", "a"), calls=2), calls_per_key_max=1))
    key = keys.find("a")
    assert key is not None
    keys.enter(key)
    keys.enter(key)
    with pytest.raises(Exception, match="more than 2 calls at a time"):
        keys.enter(key)
    keys.leave(key)
    keys.enter(key)


@given(st.lists(st.floats(0, 100), max_size=50), st.integers(1, 120))
def test_a_token_bucket_admits_no_more_than_its_burst_and_rate(gaps_s: list[float], per_minute: int) -> None:
    bucket, now_s, passed = TokenBucket(per_minute, 0), 0.0, 0
    for gap_s in gaps_s:
        now_s += gap_s
        passed += bucket.take(now_s)
        assert passed <= per_minute * (1 + now_s / 60) + 1e-6
        assert 0 <= bucket.remaining(now_s) <= per_minute
    assert bucket.take(now_s + bucket.seconds_until(now_s) + 1e-6)
    assert bucket.remaining(now_s + 180) == per_minute


@pytest.mark.parametrize(("taken", "said"), [(0, "0ms"), (1, "500ms"), (50, "25s"), (120, "1m0s")])
def test_times_have_the_format_of_openai(taken: int, said: str) -> None:
    bucket = TokenBucket(120, 0)
    assert all(bucket.take(0) for _ in range(taken))
    assert bucket.headers(0)["x-ratelimit-reset-requests"] == said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "the API is open to this machine only"),
        ({"api_keys": ("a",), "host": "0.0.0.0"}, "calls must show an API key"),
        ({"host": "0.0.0.0", "open_to_network": True}, "the API is open to all who can reach 0.0.0.0"),
    ],
)
def test_the_start_logs_who_may_call(fields: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings = GatewaySettings(model="tiny", **fields)
    check_access(settings, KeyRing(settings))
    assert said in caplog.text


def test_without_keys_only_loopback_is_served_unless_asked_otherwise() -> None:
    settings = GatewaySettings(model="tiny", host="0.0.0.0")
    with pytest.raises(SettingError, match=r"0\.0\.0\.0 can be reached from outside and no API keys are set"):
        check_access(settings, KeyRing(settings))
