"""Stages as processes on this machine, and an engine over them, for measurements and tests of their links."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Claim, Epoch, NewRequest
from orca.core.process.ports import free_port
from orca.scheduler.engines.grpc_engine import GrpcEngine

BLOCK_TOKENS = 4


def engine_for(addresses: Sequence[str], **choices: Any) -> GrpcEngine:
    """Return an engine with time limits that a busy machine keeps; `choices` override them."""
    defaults: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "slots": None,
        "block_tokens": BLOCK_TOKENS,
        "prefetch": 0,
        "step_timeout_s": 60.0,
        "join_timeout_s": 60.0,
    }
    return GrpcEngine(addresses, **(defaults | choices))


def new_request(
    handle: int,
    tokens: Sequence[int],
    new_tokens: int,
    *,
    log: Sequence[int] = (),
    decoder_prefix: tuple[int, ...] = (),
    **sampling: Any,
) -> NewRequest:
    """Return a request as a step carries it, with the `log` of its output if it starts again; greedy by default.

    Args: decoder_prefix: with an encoder-decoder model, the beginning of its target; `tokens` are then its source.
    """
    return NewRequest(
        handle=handle,
        request_id=f"request{handle}.0",
        claim=Claim(1, "test/1"),
        tokens=(*tokens, *log),
        prompt_length=len(tokens),
        max_total_tokens=len(tokens) + len(decoder_prefix) + new_tokens,
        sampling=SamplingParams(**({"temperature": 0.0} | sampling)),
        decoder_prefix=decoder_prefix,
        max_new_tokens=new_tokens if decoder_prefix else None,
    )


class Stages:
    """Real stages: one controller process each, with its rank processes."""

    def __init__(
        self,
        model: Path,
        *,
        stages: int,
        tensor: int,
        log_folder: Path,
        slots: int = 1024,
        flags: Sequence[str] = (),
    ) -> None:
        self.stages, self.tensor = stages, tensor
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(stages)]
        self._logs = [log_folder / f"stage{stage}.jsonl" for stage in range(stages)]
        self._epochs = itertools.count(1)
        self.processes: list[subprocess.Popen[bytes]] = []
        for stage, (address, log) in enumerate(zip(self.addresses, self._logs, strict=True)):
            chosen = {
                "model": model,
                "stage": stage,
                "stages": stages,
                "tensor": tensor,
                "threads": 1,
                "listen": address,
                "slots-max": slots,
                "iteration-log": log,
                "log-level": "error",
            }
            arguments = [str(part) for name, value in chosen.items() for part in (f"--{name}", value)]
            command = [sys.executable, "-m", "orca.worker.service", *arguments, *flags]
            self.processes.append(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}))

    def next_epoch(self) -> Epoch:
        return Epoch(next(self._epochs), "test")

    def rank_pids(self, stage: int) -> list[int]:
        controller = self.processes[stage].pid
        return [int(pid) for pid in Path(f"/proc/{controller}/task/{controller}/children").read_text().split()]

    def log(self, stage: int, epoch: Epoch) -> list[dict[str, Any]]:
        """Return the stage's iteration log of an epoch, a line per step."""
        lines = [json.loads(line) for line in self._logs[stage].read_text().splitlines()]
        return [line for line in lines if line["epoch"] == epoch.number]

    def stop(self) -> list[int]:
        """Stop all stages. Returns: the controllers' exit statuses."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        return [process.wait(30) for process in self.processes]
