"""The output of `orca up` for a user."""

import asyncio
import io
import json
import re
import shlex
import sys
import traceback
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from orca.cli.up.display import ActivityProgress, Display, access_note, examples, interpreter
from orca.cli.up.health_checks import http_status
from orca.cli.up.log_errors import LogFollower, error_message, follow_errors, readable
from orca.cli.up.readiness import READY, STARTING, StartStatus, epochs_of, wait_until_ready
from orca.cli.up.spec import ProcessSpec, Role
from orca.core.process.internal_port import InternalPort, Page
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import engine_pb2_grpc as pb_grpc


def test_without_a_terminal_each_phase_of_the_start_is_one_line() -> None:
    display = Display(Console(file=(shown := io.StringIO()), force_terminal=False))
    with display.progress(["worker-0.0"]) as progress:
        for standing in (STARTING, STARTING, StartStatus("loading 10 %", 90), StartStatus("loading 50 %", 450), READY):
            progress.show("worker-0.0", standing)
    assert shown.getvalue().splitlines() == ["worker-0.0: starting", "worker-0.0: loading 10 %", "worker-0.0: ready"]


def test_events_are_printed_after_their_time() -> None:
    Display(Console(file=(shown := io.StringIO()))).report("redis was killed")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z redis was killed\n", shown.getvalue())


def test_on_a_terminal_the_start_is_a_bar_per_process() -> None:
    display = Display(Console(file=(shown := io.StringIO()), force_terminal=True, width=100))
    with display.progress(["gateway", "worker-0.0"]) as progress:
        progress.show("worker-0.0", StartStatus("loading weights 40 %", 360))
    assert "loading weights 40 %" in shown.getvalue()
    assert "gateway" in shown.getvalue()


def examples_of(
    model: str = "m", *, has_keys: bool = False, has_chats: bool = True, is_encoder_decoder: bool = False
) -> str:
    return examples(
        "http://127.0.0.1:8000",
        model,
        has_keys=has_keys,
        has_chats=has_chats,
        is_encoder_decoder=is_encoder_decoder,
    )


def test_the_curl_example_is_one_shell_line_with_the_models_name_in_valid_json() -> None:
    [line] = [line for line in examples_of("it's").splitlines() if line.startswith("curl")]
    words = shlex.split(line)
    assert words[1] == "http://127.0.0.1:8000/v1/completions"
    assert json.loads(words[-1])["model"] == "it's"


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("has_chats", [False, True])
def test_the_python_example_compiles(has_keys: bool, has_chats: bool) -> None:
    _, _, rest = examples_of(has_keys=has_keys, has_chats=has_chats).partition("<<'EOF'\n")
    code, _, _ = rest.partition("\nEOF\n")
    assert compile(code, "example", "exec")
    assert ('os.environ["ORCA_API_KEY"]' in code) is has_keys
    assert ("client.chat.completions" in code) is has_chats


def test_the_examples_of_an_encoder_decoder_model_restore_lower_case_text_greedily() -> None:
    text = examples_of(has_chats=False, is_encoder_decoder=True)
    assert '"prompt": "is mr darcy at home", "max_tokens": 40, "temperature": 0}' in text
    assert 'prompt="is mr darcy at home", max_tokens=60, temperature=0, stream=True)' in text


def test_the_curl_example_of_a_keyed_api_sends_the_key_in_the_shells_variable() -> None:
    text = examples_of(has_keys=True)
    [line] = [line for line in text.splitlines() if line.startswith("curl")]
    assert ' -H "Authorization: Bearer $ORCA_API_KEY" ' in line


def test_the_examples_interpreter_is_named_relative_to_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env" / "python"))
    monkeypatch.chdir(tmp_path)
    assert interpreter() == "'my env/python'"
    monkeypatch.chdir(tmp_path.parent / tmp_path.name / "..")
    assert interpreter() == f"'{tmp_path.name}/my env/python'"
    monkeypatch.setattr(sys, "executable", "/elsewhere/python")
    assert interpreter() == "/elsewhere/python"


@pytest.mark.parametrize(
    ("host", "keys", "said"),
    [
        ("127.0.0.1", 0, "open, but only to this machine"),
        ("::1", 0, "open, but only to this machine"),
        ("localhost", 0, "open, but only to this machine"),
        ("0.0.0.0", 0, "WARNING: open to everybody who can reach 0.0.0.0"),
        ("box.example", 0, "WARNING: open to everybody who can reach box.example"),
        ("0.0.0.0", 2, "each call needs one of 2 keys"),
    ],
)
def test_the_output_says_who_may_call(host: str, keys: int, said: str) -> None:
    assert said in access_note(host, keys)


def test_the_output_names_the_file_of_keys() -> None:
    assert access_note("0.0.0.0", 0, "/etc/keys") == "api:  each call needs one of the keys in /etc/keys"


def test_an_error_line_is_printed_with_the_last_line_of_its_exception() -> None:
    line = {"level": "error", "message": "step failed", "exception": "Traceback\n  ...\nOSError: gone"}
    assert error_message(json.dumps(line)) == "step failed (OSError: gone)"
    assert error_message(json.dumps({"level": "info", "message": "fine"})) is None
    assert error_message("Traceback (most recent call last)") is None


def test_a_warning_is_readable_and_lesser_lines_are_left_out() -> None:
    line = {"time": "2026-01-02T03:04:05.6Z", "level": "warning", "service": "s", "message": "epoch over", "epoch": 3}
    assert readable(json.dumps(line)) == "03:04:05Z epoch over (epoch=3)"
    assert readable(json.dumps(line | {"level": "info"})) is None
    assert readable("Fatal Python error: Segmentation fault") == "Fatal Python error: Segmentation fault"


def test_a_traceback_is_shown_by_its_last_line() -> None:
    line = {"time": "2026-01-02T03:04:05.6Z", "level": "error", "message": "it\nbroke"}
    assert readable(json.dumps(line | {"exception_text": "Traceback\n  x\nOSError: gone\n"})) == (
        "03:04:05Z it broke (exception_text=OSError: gone)"
    )
    try:
        raise ExceptionGroup("two", [OSError("a"), ValueError("b")]) from KeyError("c")
    except ExceptionGroup:
        shown = [text for line in traceback.format_exc().splitlines() if (text := readable(line))]
    assert [text.strip(" |") for text in shown] == [
        "KeyError: 'c'",
        "ExceptionGroup: two (2 sub-exceptions)",
        "OSError: a",
        "ValueError: b",
    ]


def test_a_log_follower_reads_whole_lines_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    follower = LogFollower(log)
    with log.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert follower.new_lines() == [b"one"]
        file.write("o\n")
    assert follower.new_lines() == [b"two"]


async def test_errors_of_all_logs_are_printed_with_their_names(tmp_path: Path) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    log = tmp_path / "gateway.log"
    following = asyncio.create_task(follow_errors([("gateway", log)], told.put_nowait, lambda *_: None))
    await asyncio.sleep(0)
    log.write_text('{"level": "info", "message": "up"}\n{"level": "critical", "message": "down"}\n')
    assert await asyncio.wait_for(told.get(), 60) == "gateway: down"
    following.cancel()


async def test_the_reason_why_a_group_does_not_form_is_kept(tmp_path: Path) -> None:
    noted: asyncio.Queue[tuple[str, int, str]] = asyncio.Queue()
    log = tmp_path / "scheduler-0.log"
    note = lambda *broken: noted.put_nowait(broken)  # noqa: E731
    following = asyncio.create_task(follow_errors([("scheduler-0", log)], lambda _: None, note))
    await asyncio.sleep(0)
    log.write_text('{"level": "warning", "message": "epoch over", "epoch": 3, "reason": "too few slots"}\n')
    assert await asyncio.wait_for(noted.get(), 60) == ("scheduler-0", 3, "too few slots")
    following.cancel()


async def test_http_status_is_none_when_nobody_answers(unused_tcp_port: int) -> None:
    assert await http_status(f"127.0.0.1:{unused_tcp_port}", "/ready", 1.0) is None

    async def away(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Away\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(away, "127.0.0.1", 0) as server:
        assert await http_status(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "/ready", 60.0) == 503


class WaitingStage(pb_grpc.StageServicer):
    """Idle, or joined to epoch 4 once `has_joined`."""

    has_joined = False

    async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:  # noqa: ARG002, N802
        phase = pb.StatusReply.JOINED if self.has_joined else pb.StatusReply.IDLE
        return pb.StatusReply(phase=phase, epoch=pb.Epoch(number=4))


async def test_a_waiting_stage_reports_why_and_is_up_only_in_a_newer_epoch(tmp_path: Path) -> None:
    server = grpc.aio.server()
    pb_grpc.add_StageServicer_to_server(stage := WaitingStage(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    spec = ProcessSpec(role=Role.WORKER, name="w", command=(), address=address, log=tmp_path, scheduler="scheduler-0")
    shown: list[str] = []

    def show(_: str, standing: StartStatus) -> None:
        if standing != STARTING:  # as which a stage counts that did not answer in time
            shown.append(standing.text)
            stage.has_joined = True

    assert await epochs_of([spec]) == {"w": 4}
    reason_of = {"scheduler-0": "the engine failed: too few slots"}.get
    await asyncio.wait_for(wait_until_ready([spec], show, reason_of=reason_of, older_epochs={"w": 3}), 60)
    assert shown == ["waiting for the group: the engine failed: too few slots", "ready"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait_until_ready([spec], show, older_epochs={"w": 4}), 0.3)
    await server.stop(None)


async def test_a_group_is_up_only_when_its_scheduler_has_formed_it(tmp_path: Path) -> None:
    """Its stages join each epoch that is tried, also where the scheduler then finds that it may not serve."""
    server = grpc.aio.server()
    pb_grpc.add_StageServicer_to_server(stage := WaitingStage(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stage.has_joined = True
    status = 503
    ready = await InternalPort.open("127.0.0.1:0", {"/ready": lambda: Page(b"{}", status=status)})
    specs = [
        ProcessSpec(role=role, name=name, command=(), address=address, log=tmp_path, health=health, scheduler=scheduler)
        for role, name, health, scheduler in (
            (Role.SCHEDULER, "scheduler-0", ready.address, None),
            (Role.WORKER, "w", None, "scheduler-0"),
        )
    ]
    shown: list[tuple[str, str]] = []

    def show(name: str, standing: StartStatus) -> None:
        nonlocal status
        if standing != STARTING:  # as which a stage counts that did not answer in time
            shown.append((name, standing.text))
            status = 200

    await asyncio.wait_for(wait_until_ready(specs, show, reason_of={"scheduler-0": "too few slots"}.get), 60)
    assert (shown[0], shown[-1]) == (("w", "waiting for the group: too few slots"), ("w", "ready"))
    ready.close()
    await server.stop(None)


class LoadingStage(pb_grpc.StageServicer):
    """A stage that finds its kernels, then loads, then is there: `steps` ahead."""

    steps = 0

    async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:  # noqa: N802, ARG002
        permille, detail = ((0, "rank 0: finds kernels"), (400, "rank 0: reads weights"), (1000, ""))[self.steps]
        phase = pb.StatusReply.LOADING if detail else pb.StatusReply.JOINED
        return pb.StatusReply(phase=phase, epoch=pb.Epoch(number=1), loaded_permille=permille, detail=detail)


async def test_a_stage_reports_its_state_before_it_reads_weights(tmp_path: Path) -> None:
    server = grpc.aio.server()
    pb_grpc.add_StageServicer_to_server(stage := LoadingStage(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    spec = ProcessSpec(role=Role.WORKER, name="w", command=(), address=address, log=tmp_path)
    shown: list[str] = []

    def show(_: str, standing: StartStatus) -> None:
        if standing != STARTING:  # as which a stage counts that did not answer in time
            shown.append(standing.text)
            stage.steps = min(len(shown), 2)

    await asyncio.wait_for(wait_until_ready([spec], show), 60)
    assert shown == ["rank 0: finds kernels", "loading weights 40 %", "ready"]
    await server.stop(None)


def test_an_activity_without_a_terminal_is_a_line_now_and_then() -> None:
    seconds = iter([0.0, 1.0, 5.0, 20.0, 21.0, 100.0])
    console = Console(file=(shown := io.StringIO()), force_terminal=False)
    with ActivityProgress(console, "profile", 300, clock=lambda: next(seconds)) as activity:
        for number in range(5):
            activity.show(f"  round {number} [1/2]")
    assert shown.getvalue().splitlines() == [f"profile: round {number} [1/2]" for number in (0, 2, 4)]


def test_an_activity_on_a_terminal_is_a_bar() -> None:
    display = Display(Console(file=(shown := io.StringIO()), force_terminal=True, width=100))
    for seconds in (300, None):
        with display.activity("search", seconds=seconds) as activity:
            activity.show("  rra: [B_E 4]")
    assert "search" in shown.getvalue()
    assert "rra: [B_E 4]" in shown.getvalue()
