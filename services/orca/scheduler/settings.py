"""The settings of a scheduler, such as `--prefetch 1` or `ORCA_SCHEDULER_PREFETCH=1` (see core.process.settings)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from orca.core.domain.engine import PrefixCharge
from orca.core.domain.errors import BadValue
from orca.core.domain.model import DTYPES, QUANTIZATIONS
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.process.settings import (
    check_bounds,
    is_address,
    log_format_setting,
    log_level_setting,
    metric_names_setting,
    read_settings,
    require,
    required,
    setting,
)
from orca.core.transport.tls_files import (
    TlsFiles,
    tls_ca_setting,
    tls_certificate_setting,
    tls_key_setting,
    tls_server_name_setting,
)
from orca.pool.order.order_rules import PATIENCE_MAX_S, Drop, Order, OrderRules, Utility
from orca.scheduler.loop import SchedulingOptions
from orca.scheduler.policy.cycle import DEFAULT_THRESHOLD_PERCENT, CycleControls
from orca.scheduler.policy.policies import POLICIES, policy_of
from orca.scheduler.policy.policy import BatchBounds, Policy
from orca.scheduler.policy.request_level import HABITS, Habits, RequestLevelPolicy

PREFIX = "ORCA_SCHEDULER_"
CYCLE_SETTINGS = tuple(field.name for field in dataclasses.fields(CycleControls))
"""The settings that are controls of the policy rra, by the names of the controls."""
ORDER_SETTINGS = ("utility", "eta_percent", "patience_s", "drop")
"""The settings that are rules of an order of claims other than arrival."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSettings:
    """The settings of batching, for a scheduler and for commands that start schedulers."""

    policy: str = setting(
        "iteration",
        "iteration is Algorithm 1 of the ORCA paper, request_level is the paper's baseline, rra alternates one encode"
        " iteration of new requests with decode iterations (ExeGPT)",
        choices=POLICIES,
    )
    max_batch_size: int = setting(16, "maximum number of requests in a batch", least=1)
    max_batch_tokens: int | None = setting(
        None,
        "maximum number of tokens in a step; prompts then run in chunks, sources of encoder-decoder models whole, and a"
        " source that does not fit enters alone; unset runs prompts whole",
        least=1,
    )
    microbatch_size: int | None = setting(
        None, "request_level only: requests in a microbatch; unset does not split batches", least=1
    )
    without_habits: tuple[str, ...] = setting(
        (), f"request_level only: comma-separated habits to switch off, of {' '.join(HABITS)}"
    )
    encode_batch: int | None = setting(
        None,
        "rra only, which needs it: requests that enter with an encode iteration, with decode_batch up to twice as many;"
        " at most the number of stages times max_batch_size",
        least=1,
    )
    decode_steps: int | None = setting(
        None, "rra only, which needs it: decode iterations between two encode iterations", least=1
    )
    decode_batch: int | None = setting(
        None,
        "rra only: planned number of requests at the start of a decode phase; encode batches grow or shrink so that it"
        " stays near; unset never adjusts them for it",
        least=1,
    )
    encode_tokens: int | None = setting(
        None,
        "rra only: planned prompt tokens of an encode iteration, on average; a longer iteration leaves requests to the"
        " next one; unset sets no bound",
        least=1,
    )
    threshold_percent: int | None = setting(
        None,
        "rra only: deviation from decode_batch and encode_tokens that is left alone, in percent, at most 100; unset is"
        f" {DEFAULT_THRESHOLD_PERCENT}",
        least=0,
    )

    prefix_cache: bool = setting(
        True,
        "true lets requests begin with KV blocks of others that have the same tokens, false computes every prompt;"
        " encoder-decoder models and the policy request_level run without",
    )
    prefix_charge: str = setting(
        "each",
        "what KV blocks that several requests have take of the slots: as many blocks as requests (each), or one (once),"
        " so that more requests run; without meaning if there is no prefix cache",
        choices=tuple(PrefixCharge),
    )
    order: str = setting(
        "arrival",
        "order of claims: arrival; deadline by utility and deadline (DAS of the TCB paper); edf by deadline alone"
        " and sjf by utility per cost alone, for comparison",
        choices=tuple(Order),
    )
    utility: str | None = setting(
        None,
        "not for order arrival: worth of an answer in time, equal or inverse_length (1 / length), times its weight;"
        " unset is equal",
        choices=tuple(Utility),
    )
    eta_percent: int | None = setting(
        None, "order deadline only: share of a step that goes by utility alone, 1 to 99 percent; unset is 75", least=1
    )
    patience_s: int | None = setting(
        None,
        "not for order arrival: seconds after which a request without a deadline goes first; unset is 30",
        least=1,
    )
    drop: str | None = setting(
        None,
        "not for order arrival: waiting requests that end before their deadline: those that are certain or expected to"
        " miss it, or never; unset is certain",
        choices=tuple(Drop),
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        self._check_order()
        require(set(self.without_habits) <= set(HABITS), self, "without_habits", f"of {' '.join(HABITS)}")
        is_request_level = self.policy == "request_level"
        for name in ("microbatch_size", "without_habits"):
            require(is_request_level or not getattr(self, name), self, name, "for this policy: only for request_level")
        self._check_cycle()
        is_chunked = bool(self.max_batch_tokens)
        require(not is_chunked or self.policy == "iteration", self, "max_batch_tokens", f"for the policy {self.policy}")
        # A full batch of increments must always leave a token for the oldest prompt.
        is_enough = not self.max_batch_tokens or self.max_batch_tokens > self.max_batch_size
        require(is_enough, self, "max_batch_tokens", f"above max_batch_size ({self.max_batch_size})")

    def check_stages(self, stages: int) -> None:
        """Check that the controls of the policy rra can be reached with so many stages. Raises: BadValue."""
        controls = self.make_bounds().cycle
        if controls is not None:
            broken = controls.broken_rule(stages=stages, max_batch_size=self.max_batch_size)
            require(broken is None, self, *(broken or ("encode_batch", "")))

    def make_bounds(self) -> BatchBounds:
        """Return the bounds that may change while the scheduler runs."""
        controls = {name: getattr(self, name) for name in CYCLE_SETTINGS if getattr(self, name) is not None}
        return BatchBounds(
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
            cycle=CycleControls(**controls) if self.encode_batch and self.decode_steps else None,
        )

    def make_rules(self) -> OrderRules | None:
        """Return the rules of the order of claims; None for arrival."""
        if self.order == Order.ARRIVAL:
            return None
        given = {
            "utility": self.utility and Utility(self.utility),
            "eta": self.eta_percent and self.eta_percent / 100,
            "patience_ms": self.patience_s and self.patience_s * 1000,
            "drop": self.drop and Drop(self.drop),
        }
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return OrderRules(order=Order(self.order), **chosen)

    def make_policy(self) -> Policy:
        habits = Habits.without(self.without_habits)
        return policy_of(self.policy, RequestLevelPolicy(microbatch_size=self.microbatch_size, habits=habits))

    @property
    def no_prefix_cache(self) -> str | None:
        """Reason why the policy runs without a prefix cache; None if it can have one."""
        return "the policy request_level computes each prompt" if self.policy == "request_level" else None

    @property
    def _has_all_bounds(self) -> bool:
        """False if a file has the bounds that are left out here."""
        return True

    def _check_order(self) -> None:
        is_ordered = self.order != Order.ARRIVAL
        for name in ORDER_SETTINGS:
            require(is_ordered or getattr(self, name) is None, self, name, "for this order: not for arrival")
        is_das = self.order == Order.DEADLINE
        require(is_das or self.eta_percent is None, self, "eta_percent", "for this order: only for deadline")
        require((self.eta_percent or 1) <= 99, self, "eta_percent", "99 or less")
        require((self.patience_s or 1) <= PATIENCE_MAX_S, self, "patience_s", f"{PATIENCE_MAX_S} or less")

    def _check_cycle(self) -> None:
        is_rra = self.policy == "rra"
        for name in CYCLE_SETTINGS:
            require(is_rra or getattr(self, name) is None, self, name, "for this policy: only for rra")
        for name in ("encode_batch", "decode_steps"):
            if is_rra and self._has_all_bounds and getattr(self, name) is None:
                raise BadValue(name, "the policy rra needs it")
        require((self.threshold_percent or 0) <= 100, self, "threshold_percent", "100 or less")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(BatchingSettings):
    """All settings of a scheduler process."""

    model: str = required("folder of the model: config.json, tokenizer.json, and a sample of its weights")
    dtype: str = setting("float32", "number format in which the stages compute; part of the revision", choices=DTYPES)
    quantization: str | None = setting(
        None,
        "format to which the stages round matrices; part of the revision; unset leaves them in dtype",
        choices=QUANTIZATIONS,
    )
    stages: tuple[str, ...] = required("host:port of each stage's controller, comma-separated, stage 0 first")
    group: str = setting("g0", "name of the group that this process schedules, without spaces, colons and braces")
    listen: str = setting(
        "127.0.0.1:0", "host:port on which the stages meet to form the group; port 0 uses a free port"
    )
    advertise: str | None = setting(None, "host by which stages reach `listen`; unset uses the host of `listen`")
    pool: str = setting("redis://127.0.0.1:6379/0", "URL of the pool's Redis")
    deployment: str = setting("orca", "name of this deployment; other deployments may use the same Redis")
    tls_ca_file: str | None = tls_ca_setting()
    tls_certificate_file: str | None = tls_certificate_setting()
    tls_key_file: str | None = tls_key_setting()
    tls_server_name: str | None = tls_server_name_setting()
    generation: int = setting(1, "number of the model's revision: the highest becomes current", least=1)
    slots: int | None = setting(None, "KV slots in tokens; unset uses as many as every stage has memory for", least=1)
    block_tokens: int = setting(DEFAULT_BLOCK_TOKENS, "slots in a KV block", least=1)
    # For steps that were lost between stages. A long step may take any time, and its controller ends a rank that hangs.
    # Twice the time that a controller gives such a rank: the controller is nearer to the fault, and knows its cause.
    step_timeout_s: float = setting(
        10.0, "seconds after which a step without a result ends the epoch, if no stage is at work", least=0.001
    )
    # The way to the master and back takes some milliseconds by gRPC, which a second batch hides.
    prefetch: int = setting(1, "1 submits one more batch before the oldest was read; 0 is Algorithm 1", least=0)
    # A commit costs a call of the pool, a read of each gateway and a write to each client, whatever its size.
    commit_interval_ms: int = setting(
        0,
        "milliseconds from one commit of tokens to the next, doubled while requests queue; first tokens and ends wait"
        " for it only while requests queue, and only if their request has no deadline and was submitted more than"
        " sixteen intervals ago",
        least=0,
    )
    join_timeout_s: float = setting(
        60.0, "seconds within which the stages must form an epoch once their weights are loaded", least=0.001
    )
    # A stage of a small model is back in 3 s, ranks of a large one load for minutes.
    unformed_s: float = setting(
        30.0, "seconds after which the log reports a group that is not formed, again whenever it doubles", least=0.001
    )
    predecessor_exited: bool = setting(
        False, "true if the starter of this process saw the group's last scheduler exit, so its seat is free at once"
    )
    metrics_listen: str | None = setting(
        None,
        "host:port of /metrics (for Prometheus), /health, and /ready, which is 200 while the group is formed; port 0"
        " uses a free port; unset serves none",
    )
    metric_names: tuple[str, ...] = metric_names_setting()
    name: str | None = setting(
        None,
        "name by which clients call the model, for metrics under vLLM's names; unset means the folder's name",
    )
    # For a cluster: an edit of the deployment is in force without a new pod.
    bounds_file: str | None = setting(
        None,
        "JSON file with max_batch_size, max_batch_tokens if steps have a bound, and controls of the policy rra"
        f" ({', '.join(CYCLE_SETTINGS)}); it overrides the settings of these names and is read again when it changes",
    )
    iteration_log: str | None = setting(None, "file to which one JSON line per step is written; unset writes none")
    log_format: str = log_format_setting()
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        # super() does not find the class of a dataclass with slots.
        BatchingSettings.__post_init__(self)
        self.check_stages(len(self.stages))
        require(self.prefetch <= 1, self, "prefetch", "0 or 1")
        for address in self.stages:
            require(is_address(address, least_port=1), self, "stages", "a list of host:port")
        require(is_address(self.listen), self, "listen", "host:port")
        require(self.metrics_listen is None or is_address(self.metrics_listen), self, "metrics_listen", "host:port")
        require(self.name is None or bool(self.name.strip()), self, "name", "a name")
        TlsFiles.of(self)
        is_name = bool(self.group) and not set(self.group) & set(" :{}\n")
        require(is_name, self, "group", "a name without spaces, colons and braces")

    @property
    def _has_all_bounds(self) -> bool:
        return self.bounds_file is None

    def make_options(self, bounds: BatchBounds | None = None) -> SchedulingOptions:
        """Return the options of scheduling. Args: bounds: bounds of a batch that override those of the settings."""
        options = SchedulingOptions(
            prefetch=self.prefetch,
            are_slots_chosen=self.slots is not None,
            generation=self.generation,
            is_predecessor_dead=self.predecessor_exited,
            prefix_charge=PrefixCharge(self.prefix_charge),
        )
        return options.with_bounds(bounds or self.make_bounds())


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> SchedulerSettings:
    """Read the settings. Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        SchedulerSettings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca scheduler",
        description="Run one group's scheduler.",
    )
