"""The settings of the pool. Every part of a deployment uses the same values."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from orca.core.domain.errors import SettingError
from orca.core.process.settings import read_variables

LEASE_LEAST_MS = 1_000
"""Two renewals. With a shorter lease a group forms again and again, or never, although every part is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Bounds and times of the pool. Times ending in `_ms` run in the pool's awake time unless they say otherwise."""

    seat_lease_ms: int = 3_000
    """Time that a silent scheduler keeps its group: six missed heartbeats. A longer lease only delays the take-over."""

    reader_lease_ms: int = 5_000
    """Time that a reader entry lives without renewal, so that a gateway that died stops counting as a reader."""

    resume_grace_ms: int = 5_000
    """Time that a request goes on without a living reader, so that its client can come back to another gateway."""

    retention_ms: int = 600_000
    """Time that an ended request stays readable: ten minutes, for clients that come back late."""

    retention_least_ms: int = 60_000
    """Time that an ended request stays readable while reserved bytes exceed nine tenths of `bytes_max`. A minute still
    covers a client's retry."""

    retire_ms: int = 600_000
    """Time that requests of a replaced revision may still run before they end with `model_replaced`."""

    max_queued: int = 1_000
    """Requests that may wait, over all revisions; more are refused with QueueFull. A longer queue helps nobody: a group
    that serves 20 requests a second needs 50 seconds for 1,000."""

    max_queued_prompt_tokens: int = 10_000_000
    """Prompt tokens that may wait: they bound the cost, as `max_queued` bounds the number. One request alone may exceed
    it."""

    bytes_max: int = 1 << 30
    """Redis memory, in bytes, that requests may reserve; more are refused with PoolFull. If Redis has a maxmemory, this
    may be at most `codec.room_for_requests` of it."""

    call_timeout_ms: int = 2_000
    """Bound of one call to Redis, wall clock. It is below the seat's lease, so a lost reply does not cost the seat."""

    hint_poll_ms: int = 1_000
    """Bound of one wait for notifications, wall clock."""

    replicas: int = 0
    """Replicas that must hold what a gateway accepts or shows (WAIT): all that may be promoted. 0 waits for none."""

    connections_max: int = 32
    """Connections of one process for the calls of its clients: calls are short, so few are enough. A few more serve
    long reads and the calls for all clients at once, and one serves notifications."""

    user: str = "default"
    """Redis user of all parts; access.py lists the rights that it needs."""

    password_file: str | None = None
    """File that holds the user's password, read at each connect. None does not log in."""

    tls_ca_file: str | None = None
    """Certificates (PEM) that may have signed the server's, for `rediss://`; None uses those of the system."""

    tls_certificate_file: str | None = None
    """Our own certificate (PEM), for a `rediss://` server that asks for one; read at each connect, as its key is."""

    tls_key_file: str | None = None
    """Private key (PEM) of `tls_certificate_file`."""

    accepts_loss: bool = False
    """Accept a Redis without an append-only file, which forgets all requests when it restarts."""

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
        """Reserved bytes above which ended requests are kept for `retention_least_ms` only."""
        return self.bytes_max * 9 // 10


def parse_pool_settings(environment: Mapping[str, str]) -> PoolSettings:
    """Read variables such as `ORCA_POOL_MAX_QUEUED=100`; every part of a deployment gets the same.

    Raises: SettingError that names the setting, also for leases so short that no seat and no reader lasts.
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
