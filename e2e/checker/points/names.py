"""Named points of the write path, and what can be done there. Plain data for both sides of the folder."""

from dataclasses import dataclass

FOLDER_VARIABLE = "ORCA_CHECKER_INJECT"
MUTANT_VARIABLE = "ORCA_CHECKER_MUTANT"

KILL_BEFORE = "kill before"  # the call is not made
KILL_AFTER = "kill after"  # it was made, and nobody has used its answer
DROP_REPLY = "drop reply"  # it was made, and the caller is told that no answer came
ACTIONS = (KILL_BEFORE, KILL_AFTER, DROP_REPLY)


@dataclass(frozen=True, slots=True)
class Point:
    """One call of one part. A served point is the answering end of a gRPC call."""

    part: str  # gateway | scheduler | worker
    call: str  # `redis.commit`, `grpc.Run`, `serve.Run`
    is_of_forming: bool = False  # made when a group forms; else while tokens flow

    @property
    def name(self) -> str:
        return f"{self.part} {self.call}"


POINTS = (
    *(Point("gateway", f"redis.{name}") for name in ("submit", "read", "renew", "attach", "detach", "cancel", "sweep")),
    *(Point("scheduler", f"redis.{name}") for name in ("claim", "commit", "heartbeat", "sweep")),
    *(Point("scheduler", f"redis.{name}", True) for name in ("enter", "promise_slots", "set_revision")),
    Point("scheduler", "grpc.Run"),
    Point("scheduler", "grpc.Results"),
    *(Point("scheduler", f"grpc.{name}", True) for name in ("Status", "Join")),
    *(Point("scheduler", f"serve.{name}", True) for name in ("Set", "Get", "Add")),
    Point("worker", "grpc.Run"),
    Point("worker", "serve.Run"),
    *(Point("worker", f"serve.{name}", True) for name in ("Status", "Join")),
)
