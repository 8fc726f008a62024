"""The errors that cross a boundary between services.

OrcaError
├── InvalidRequest      the caller's mistake; `param` names the field (HTTP 400)
│   ├── NeverFits       could not run even on an idle group (HTTP 400)
│   └── NotInForce      of another revision than the pool accepts (gateway: the model in force, or HTTP 503)
├── NameTaken           what was submitted under this name before is something else (HTTP 422)
├── ModelError          a model folder that cannot be served; says which file and why
├── SettingError        a flag, variable or file that stops the start; names the setting
│   └── BadValue        its value is against the rule
├── Overloaded          at the door: nothing was stored, come back later
│   ├── QueueFull       the queue's bound is reached (HTTP 429)
│   └── PoolFull        the pool cannot promise the bytes the request may write (HTTP 503)
├── PoolUnavailable     the pool gave no answer; the call may have happened or not (HTTP 503)
│   └── PoolNotDurable  it cannot keep what it would accept now (HTTP 503)
├── UnknownRequest      no such record, or no longer (HTTP 404)
└── EngineError         a stage or a link of the group failed; the epoch is over
"""


class OrcaError(Exception):
    """Root of all errors that are ours."""


class InvalidRequest(OrcaError):
    """A request that cannot be served as written."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NeverFits(InvalidRequest):
    """A request that needs more slots than any group of its revision has."""

    def __init__(self, need: int, promised: int) -> None:
        """Both in slots: that the largest request of the call needs, and that the pool promises to any one."""
        super().__init__(f"prompt and max_tokens need {need} slots, the engine has {promised}", param="max_tokens")
        self.promised = promised


class NotInForce(InvalidRequest):
    """A request of another revision than the one that the pool accepts now."""

    def __init__(self, revision: str, in_force: str | None) -> None:
        """`in_force`: the revision that it accepts; None while there is none."""
        current = f"the current one is {in_force}" if in_force else "there is no current one yet"
        super().__init__(f"revision {revision} is not served: {current}", param="model")
        self.in_force = in_force


class NameTaken(OrcaError):
    """Another request has the name that this one was to be stored under."""


class ModelError(OrcaError):
    """A model folder that cannot be served."""


class SettingError(OrcaError):
    """A setting with an unknown name or a bad value."""


class BadValue(SettingError):
    """A value against the rule of its setting."""

    def __init__(self, name: str, complaint: str) -> None:
        """`name` is that of the field, or the flag or variable that gave the value."""
        super().__init__(f"setting {name}: {complaint}")
        self.name = name
        self.complaint = complaint


class Overloaded(OrcaError):
    """Refused at the door; nothing was stored."""

    def __init__(self, message: str, *, retry_after_s: float = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Overloaded):
    """As many requests wait as the queue's bound allows."""


class PoolFull(Overloaded):
    """The pool has no room for the bytes that the request may still write."""


class PoolUnavailable(OrcaError):
    """The pool did not answer in time; whether the call happened is unknown."""


class PoolNotDurable(PoolUnavailable):
    """The pool answers, but cannot keep what it would accept now: its Redis is not fit, or its disk hangs."""


class UnknownRequest(OrcaError):
    """The pool holds no record of that name."""


class EngineError(OrcaError):
    """A stage, a rank or a link failed; every step of the epoch is void.

    `reported_epoch` is the highest epoch that a stage told of, 0 when none did: the next one must be above it.
    `is_from_inside`: the engine failed by itself, so what it ran may be why. False for a death or a broken link that
    came from outside, and where nobody knows.
    """

    def __init__(self, message: str = "", *, reported_epoch: int = 0, is_from_inside: bool = False) -> None:
        super().__init__(message)
        self.reported_epoch = reported_epoch
        self.is_from_inside = is_from_inside
