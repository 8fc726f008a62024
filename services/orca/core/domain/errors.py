"""The errors that cross a boundary between services.

OrcaError
├── InvalidRequest      the caller's mistake; `param` names the field (HTTP 400)
│   ├── NeverFits       could not run even on an idle group (HTTP 400)
│   ├── NotStoredYet    the release before, which may still run, cannot read one of its fields (HTTP 400)
│   └── NotInForce      its revision is not the one that the pool accepts (gateway: the model in force, or HTTP 503)
├── NameTaken           another request has the name already (HTTP 422)
├── ModelError          a model folder that cannot be served; names the file and the reason
├── SettingError        a flag, variable or file that stops the start; names the setting
│   └── BadValue        the value breaks the rule of its setting
├── Overloaded          refused for load: nothing was stored, try again later
│   ├── QueueFull       the queue's bound is reached (HTTP 429)
│   └── PoolFull        the pool cannot promise the bytes the request may write (HTTP 503)
├── PoolUnavailable     the pool did not answer; the call may have happened or not (HTTP 503)
│   └── PoolNotDurable  the pool could not keep what it accepts now (HTTP 503)
├── UnknownRequest      the pool has no such record, or no longer (HTTP 404)
│   └── JustForgotten   the pool was told a moment ago to forget a keyed call of its name (HTTP 409)
└── EngineError         a stage or a link of the group failed; the epoch is over
"""


class OrcaError(Exception):
    """Root of all errors of this product."""


class InvalidRequest(OrcaError):
    """A request that cannot be served as written."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NeverFits(InvalidRequest):
    """A request that needs more slots than any group of its revision has."""

    WORDS = "prompt and max_tokens need %d slots, the engine has %d"

    def __init__(self, need: int, promised: int) -> None:
        """Args: need: slots of the call's largest request; promised: slots that the pool promises to one request."""
        super().__init__(self.WORDS % (need, promised), param="max_tokens")
        self.need = need
        self.promised = promised


class NotStoredYet(InvalidRequest):
    """A request with a field that no record may have while the schema number of the release before is in force."""

    def __init__(self, names: tuple[str, ...], in_force: int) -> None:
        """Args: names: of the fields; in_force: the schema number of the pool."""
        super().__init__(
            f"{', '.join(names)}: not available while schema {in_force} of the release before is in force in the pool",
            param=names[0],
        )
        self.names = names
        self.in_force = in_force


class NotInForce(InvalidRequest):
    """A request whose revision is not the one that the pool accepts now."""

    def __init__(self, revision: str, in_force: str | None) -> None:
        """Args: in_force: the revision that the pool accepts; None while there is none."""
        current = f"the current one is {in_force}" if in_force else "there is no current one yet"
        super().__init__(f"revision {revision} is not served: {current}", param="model")
        self.in_force = in_force


class NameTaken(OrcaError):
    """Another request has the name under which this one was to be stored."""


class ModelError(OrcaError):
    """A model folder that cannot be served."""


class SettingError(OrcaError):
    """A setting with an unknown name or a bad value."""


class BadValue(SettingError):
    """A value that breaks the rule of its setting."""

    def __init__(self, name: str, complaint: str) -> None:
        """Args: name: of the field, or of the flag or variable with the value; complaint: the value and the rule."""
        super().__init__(f"setting {name}: {complaint}")
        self.name = name
        self.complaint = complaint


class Overloaded(OrcaError):
    """A request that is refused for load; nothing was stored."""

    def __init__(self, message: str, *, retry_after_s: float = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Overloaded):
    """The queue of waiting requests has reached its bound."""


class PoolFull(Overloaded):
    """The pool has no room for the bytes that the request may still write."""


class PoolUnavailable(OrcaError):
    """The pool did not answer in time; whether the call happened is unknown."""


class PoolNotDurable(PoolUnavailable):
    """The pool answers but could not keep what it accepts now: its Redis is unfit, or its disk hangs."""


class UnknownRequest(OrcaError):
    """The pool holds no record of that name."""


class JustForgotten(UnknownRequest):
    """A keyed call whose name was forgotten on demand a moment ago; nothing was stored under it."""

    def __init__(self, name: str, *, rest_s: float) -> None:
        """Args: rest_s: seconds until the name is free again, at least; zero or less if the next sweep frees it."""
        super().__init__(name)
        self.rest_s = rest_s


class EngineError(OrcaError):
    """A stage, a rank or a link failed; every step of the epoch is void.

    A request that cannot be run is no such error: the step's result refuses it (core.domain.refusal).
    `reported_epoch` is the highest epoch that a stage reported, 0 if none did: the next one must be above it.
    `is_from_inside`: the engine failed by itself, so the requests that it ran may be the reason. False for a death or a
    broken link that came from outside, and where the cause is unknown.
    """

    def __init__(self, message: str = "", *, reported_epoch: int = 0, is_from_inside: bool = False) -> None:
        super().__init__(message)
        self.reported_epoch = reported_epoch
        self.is_from_inside = is_from_inside
