"""What can be chosen about `orca up`, and the command line that says it."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from orca.cli.small_model import small_model_folder
from orca.core.errors import SettingError
from orca.core.model import DTYPES
from orca.core.request import DEFAULT_BLOCK_TOKENS
from orca.scheduler.request_level import HABITS

POLICIES = ("iteration", "request_level")
KEYS_VARIABLE = "ORCA_GATEWAY_API_KEYS"
"""Where the gateway finds its keys; of `orca up` itself too, because flags are seen by all users of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """One system on one machine. Built from the command line only; bad values stop the start by their name."""

    model: str  # folder in Hugging Face layout, or a name on its hub
    served_name: str | None  # what clients call it; None takes the folder's own name
    host: str
    port: int  # of the gateway; 0 takes a free one
    api_keys: tuple[str, ...] = field(repr=False)  # that clients may show; none leaves the API open
    stages: int  # inter-layer partitions, one worker process each
    tensor: int  # ranks inside each stage
    replicas: int  # groups, each with all stages and a scheduler of its own
    max_batch_size: int  # requests in one iteration
    max_batch_tokens: int | None  # bound on the tokens of one iteration; None is the paper's: no bound
    prefetch: int  # 0 is Algorithm 1; 1 schedules one step ahead
    policy: str  # one of POLICIES
    microbatch_size: int | None  # request_level only: requests in a microbatch; None does not split batches
    without_habits: tuple[str, ...]  # request_level only: habits of the baseline that are switched off
    dtype: str
    device: str  # cpu or cuda
    slots: int | None  # KV slots of each group; None takes what memory allows
    threads: int  # computing threads of each rank
    data: Path | None  # Redis data and logs; None takes a folder of this port under the user's state folder
    redis_url: str | None  # a Redis that runs already; None starts one
    iteration_log: Path | None  # folder for the steps' batches and times, a file per process; None writes none
    log_level: str

    def __post_init__(self) -> None:
        for name in ("stages", "tensor", "replicas", "max_batch_size", "threads"):
            if getattr(self, name) < 1:
                raise SettingError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("max_batch_tokens", "slots", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.slots is not None and self.slots < DEFAULT_BLOCK_TOKENS:
            raise SettingError(f"--slots must be at least {DEFAULT_BLOCK_TOKENS}, one KV block, not {self.slots}")
        if self.max_batch_tokens is not None and self.policy == "request_level":
            raise SettingError("--max-batch-tokens is for --policy iteration only")
        if self.max_batch_tokens is not None and self.max_batch_tokens <= self.max_batch_size:
            # The oldest prompt must always find a token beside a full batch of increments.
            size, tokens = self.max_batch_size, self.max_batch_tokens
            raise SettingError(f"--max-batch-tokens must be above --max-batch-size ({size}), not {tokens}")
        for name in ("microbatch_size", "without_habits"):
            if getattr(self, name) and self.policy != "request_level":
                raise SettingError(f"--{name.replace('_', '-')} is for --policy request_level only")
        if unknown := sorted(set(self.without_habits) - set(HABITS)):
            raise SettingError(f"--without-habits knows {', '.join(HABITS)}, not {', '.join(unknown)}")
        if not 0 <= self.port <= 65535:
            raise SettingError(f"--port must be from 0 to 65535, not {self.port}")


def parse_settings(argv: Sequence[str]) -> UpSettings:
    """Raises: SettingError that names the flag; SystemExit only for --help."""
    given = vars(_parser().parse_args(list(argv)))
    if given["threads"] is None:
        ranks = max(1, given["stages"] * given["tensor"] * given["replicas"])
        given["threads"] = max(1, len(os.sched_getaffinity(0)) // ranks)
    if given["api_keys"] is None:
        given["api_keys"] = _words(os.environ.get(KEYS_VARIABLE, ""))
    elif not given["api_keys"]:
        raise SettingError("--api-keys holds no key")
    return UpSettings(**given)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="orca up",
        description="Start Redis, gateway, schedulers and stage workers on this machine. Ctrl-C ends all of them.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("model").add_argument
    add(
        "--model", default=str(small_model_folder()), metavar="DIR", help="folder, or name on the hub (the small model)"
    )
    add("--served-name", metavar="NAME", help="what clients call it (the folder's name)")
    add("--dtype", choices=DTYPES, default="float32", help="of weights, activations and KV cache (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where stages compute (%(default)s)")
    add = parser.add_argument_group("shape").add_argument
    add("--stages", type=int, default=2, metavar="N", help="inter-layer partitions, a process each (%(default)s)")
    add("--tensor", type=int, default=1, metavar="N", help="ranks inside each stage (%(default)s)")
    add("--replicas", type=int, default=1, metavar="N", help="groups: all stages and a scheduler (%(default)s)")
    add("--slots", type=int, metavar="N", help="KV slots of a group, in tokens (what memory allows)")
    add("--threads", type=int, metavar="N", help="computing threads of a rank (processors / ranks)")
    add = parser.add_argument_group("schedule").add_argument
    add("--max-batch-size", type=int, default=16, metavar="N", help="requests in an iteration (%(default)s)")
    add("--max-batch-tokens", type=int, metavar="N", help="tokens in an iteration (no bound)")
    add("--prefetch", type=int, choices=(0, 1), default=1, help="steps scheduled ahead (%(default)s)")
    add("--policy", choices=POLICIES, default="iteration", help="request_level is the baseline (%(default)s)")
    add("--microbatch-size", type=int, metavar="N", help="request_level: requests in a microbatch (the whole batch)")
    add("--without-habits", type=_words, default=(), metavar="A,B", help=f"request_level: off, of {', '.join(HABITS)}")
    add = parser.add_argument_group("service").add_argument
    add("--host", default="127.0.0.1", help="address of the HTTP API (%(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="port of the HTTP API; 0 takes a free one (%(default)s)")
    add(
        "--api-keys",
        type=_words,
        metavar="KEY[,KEY]",
        help=f"keys that clients must show one of; unseen by `ps` as {KEYS_VARIABLE} (none: open)",
    )
    add("--data", type=Path, metavar="DIR", help="Redis data and logs (~/.local/state/orca/PORT)")
    add("--redis-url", metavar="URL", help="a Redis that runs already (starts one)")
    add("--iteration-log", type=Path, metavar="DIR", help="write each step's batch and times, a file per process (off)")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)")
    return parser


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))
