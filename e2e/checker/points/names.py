"""Named points of the write path, and what can be done there. Plain data for both sides of the folder."""

from dataclasses import dataclass

FOLDER_VARIABLE = "ORCA_CHECKER_INJECT"
MUTANT_VARIABLE = "ORCA_CHECKER_MUTANT"

KILL_BEFORE = "kill before"  # the call is not made
KILL_AFTER = "kill after"  # it was made, and nobody has used its answer
DROP_REPLY = "drop reply"  # it was made, and the caller is told that no answer came
ACTIONS = (KILL_BEFORE, KILL_AFTER, DROP_REPLY)
COME_LATE = "come late"  # it was made, and comes once more behind the next join, as if it had been held up on its way
OUTLIVE = "outlive"  # it is on its way when its maker dies, and comes when another has just claimed the requests

CAME_LATE = "late"
"""File that says so."""

TOKENS, FORMING, CANCEL = "tokens", "forming", "cancel"


@dataclass(frozen=True, slots=True)
class Point:
    """One call of one part. A served point is the answering end of a gRPC call."""

    part: str  # gateway | scheduler | worker
    call: str  # `redis.commit`, `grpc.Run`, `serve.Run`
    made_for: str = TOKENS  # made while tokens flow, when a group forms, or for a cancel

    @property
    def name(self) -> str:
        return f"{self.part} {self.call}"


POINTS = (
    *(Point("gateway", f"redis.{name}") for name in ("submit", "read", "renew", "attach", "detach", "sweep")),
    Point("gateway", "redis.cancel", CANCEL),
    *(Point("scheduler", f"redis.{name}") for name in ("claim", "commit", "heartbeat", "sweep")),
    *(Point("scheduler", f"redis.{name}", FORMING) for name in ("enter", "promise_slots", "set_revision")),
    Point("scheduler", "grpc.Run"),
    Point("scheduler", "grpc.Results"),
    *(Point("scheduler", f"grpc.{name}", FORMING) for name in ("Status", "Join")),
    # No rank ever calls Add, which torch asks of every store.
    *(Point("scheduler", f"serve.{name}", FORMING) for name in ("Set", "Get")),
    Point("worker", "grpc.Run"),
    Point("worker", "serve.Run"),
    *(Point("worker", f"serve.{name}", FORMING) for name in ("Status", "Join")),
)
LATE_POINTS = {Point("worker", "serve.Run"): COME_LATE, Point("scheduler", "pool.commit"): OUTLIVE}
"""What comes late here is a step of an epoch that is over, and tokens of a claim that is over. Nothing else has come
for these requests meanwhile: the tokens fit the log, and the fence alone keeps them out.
"""
