"""Named points of the write path, and the actions there. Plain data for both sides of the folder."""

from dataclasses import dataclass

FOLDER_VARIABLE = "ORCA_CHECKER_INJECT"
MUTANT_VARIABLE = "ORCA_CHECKER_MUTANT"
REMOTE_VARIABLE = "ORCA_CHECKER_REMOTE"
"""Set for a scheduler that sends steps to stages of its machine as to other machines: by gRPC, where points are."""

KILL_BEFORE = "kill before"  # the call is not made
KILL_AFTER = "kill after"  # the call is made, but its answer is not used
DROP_REPLY = "drop reply"  # the call is made, but its caller gets an error instead of the answer
ACTIONS = (KILL_BEFORE, KILL_AFTER, DROP_REPLY)
COME_LATE = "come late"  # the call is made, and repeated after the next join, as if it had been delayed on its way
OUTLIVE = "outlive"  # the call is on its way when its caller dies, and arrives after another one claimed the requests

CAME_LATE = "late"
"""Name of the file that reports a late call."""

TOKENS, FORMING, CANCEL = "tokens", "forming", "cancel"


@dataclass(frozen=True, slots=True)
class Point:
    """One call of one part. A `serve` point is on the server side of a gRPC call."""

    part: str  # gateway | scheduler | worker
    call: str  # `redis.commit`, `grpc.Run`, `serve.Run`
    made_for: str = TOKENS  # tokens: made for every token | forming: when a group forms | cancel: for a cancel

    @property
    def name(self) -> str:
        return f"{self.part} {self.call}"


POINTS = (
    *(Point("gateway", f"redis.{name}") for name in ("submit", "read", "renew", "attach", "detach", "sweep")),
    Point("gateway", "redis.cancel", CANCEL),
    *(Point("scheduler", f"redis.{name}") for name in ("claim", "commit", "heartbeat", "sweep")),
    *(Point("scheduler", f"redis.{name}", FORMING) for name in ("enter", "promise_slots", "set_revision")),
    Point("scheduler", "redis.state_block_tokens", FORMING),
    Point("scheduler", "grpc.Run"),
    Point("scheduler", "grpc.Results"),
    *(Point("scheduler", f"grpc.{name}", FORMING) for name in ("Status", "Join")),
    # No rank ever calls Add, which torch requires of every store.
    *(Point("scheduler", f"serve.{name}", FORMING) for name in ("Set", "Get")),
    Point("worker", "grpc.Run"),
    Point("worker", "serve.Run"),
    *(Point("worker", f"serve.{name}", FORMING) for name in ("Status", "Join")),
)
LATE_POINTS = {Point("worker", "serve.Run"): COME_LATE, Point("scheduler", "pool.commit"): OUTLIVE}
"""The late calls are a step of an ended epoch and tokens of an ended claim. No other tokens have come for these
requests
in the meantime: the late tokens would continue the log, and only the fence keeps them out.
"""
