"""What can be chosen about the pool. Every part of a deployment uses the same values."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from orca.core.domain.errors import SettingError
from orca.core.process.settings import read_variables

LEASE_LEAST_MS = 1_000
"""Two renewals. With less a group forms anew again and again, or never, though every part is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Bounds and times of the pool. Times ending in `_ms` run in the pool's awake time unless they say otherwise."""

    seat_lease_ms: int = 3_000
    """How long a silent scheduler keeps its group. Six missed heartbeats; longer only delays the take-over."""

    reader_lease_ms: int = 5_000
    """How long a reader entry lives without renewal, so a gateway that died stops counting as a reader."""

    resume_grace_ms: int = 5_000
    """How long a request goes on without a living reader: the time a client has to come back to another gateway."""

    retention_ms: int = 600_000
    """How long an ended request stays readable: ten minutes, for clients that come back late."""

    retention_least_ms: int = 60_000
    """The same when reserved bytes pass nine tenths of `bytes_max`. A minute still covers a client's retry."""

    retire_ms: int = 600_000
    """How long requests of a replaced revision may still run before they end with `model_replaced`."""

    max_queued: int = 1_000
    """Requests that may wait, over all revisions; more are refused with QueueFull. Longer helps nobody: a group that
    serves 20 requests a second takes 50 seconds for so many."""

    max_queued_prompt_tokens: int = 10_000_000
    """Tokens of the prompts that may wait: what they will cost, as `max_queued` is how many. One alone may pass it."""

    bytes_max: int = 1 << 30
    """Redis memory, in bytes, that requests may be promised; more are refused with PoolFull. Where Redis has a
    maxmemory, at most `codec.room_for_requests` of it."""

    call_timeout_ms: int = 2_000
    """Wall clock bound of one call to Redis. Below the seat's lease, so that a lost reply does not cost the seat."""

    hint_poll_ms: int = 1_000
    """Wall clock bound of one wait for notifications."""

    replicas: int = 0
    """Replicas that must hold what a gateway accepts or shows (WAIT); 0 asks for none. All that may be promoted."""

    connections_max: int = 32
    """Connections of one process for the calls of its clients: calls are short, so few are enough. Not counted are
    the few for reading long answers, those for what it does for all its clients at once, and the one for
    notifications."""

    user: str = "default"
    """Redis user of all parts; what it must be allowed says access.py."""

    password_file: str | None = None
    """File that holds the user's password; read at each connect. None logs in nowhere."""

    tls_ca_file: str | None = None
    """For `rediss://`: certificates (PEM) that may have signed the server's; None takes those of the system."""

    tls_certificate_file: str | None = None
    """For `rediss://`: our own certificate (PEM), where the server asks for one; read at each connect, as its key."""

    tls_key_file: str | None = None
    """Private key (PEM) of `tls_certificate_file`."""

    accepts_loss: bool = False
    """Serve on a Redis without an append-only file too, which forgets all requests when it restarts."""

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name == "replicas" else 1
            if field.type is int and getattr(self, field.name) < least:
                raise SettingError(f"pool setting {field.name} must be at least {least}")
        if self.retention_least_ms > self.retention_ms:
            raise SettingError("pool setting retention_least_ms must not be larger than retention_ms")
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise SettingError("pool settings tls_certificate_file and tls_key_file go together")

    @property
    def pressure_bytes(self) -> int:
        """Reserved bytes from which on ended requests are kept for `retention_least_ms` only."""
        return self.bytes_max * 9 // 10


def parse_pool_settings(environment: Mapping[str, str]) -> PoolSettings:
    """`ORCA_POOL_MAX_QUEUED=100` and the like; every part of a deployment is given the same.

    Raises: SettingError that names the setting, also for times under which no seat and no reader lasts.
    """
    settings = read_variables(PoolSettings, environment, prefix="ORCA_POOL_")
    for name in ("seat_lease_ms", "reader_lease_ms"):
        if getattr(settings, name) < LEASE_LEAST_MS:
            raise SettingError(f"pool setting {name} must be at least {LEASE_LEAST_MS}: it is renewed twice a second")
    if settings.call_timeout_ms >= settings.seat_lease_ms:
        raise SettingError(
            f"pool setting call_timeout_ms ({settings.call_timeout_ms}) must be below seat_lease_ms "
            f"({settings.seat_lease_ms}): one lost reply would cost the seat"
        )
    return settings
