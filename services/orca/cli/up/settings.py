"""What can be chosen about `orca up`, and the command line that says it."""

import dataclasses
import os
from collections.abc import Sequence

from orca.core.domain.errors import SettingError
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.process.settings import is_loopback, log_level_setting, read_settings, require, setting
from orca.gateway.settings import PORT_MAX
from orca.gateway.settings import PREFIX as GATEWAY_PREFIX
from orca.scheduler.settings import BatchingSettings
from orca.worker.settings import DEVICES, dtype_setting, quantization_setting

KEYS_VARIABLE = f"{GATEWAY_PREFIX}API_KEYS"
"""Where the gateway finds its keys; of `orca up` itself too, because flags are seen by all users of the machine."""


KEYS_FILE_VARIABLE = f"{GATEWAY_PREFIX}API_KEYS_FILE"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings(BatchingSettings):
    """One system on one machine; all its groups batch alike."""

    model: str | None = setting(
        None, "folder in Hugging Face layout, or name on its hub; unset takes the small model that Orca comes with"
    )
    served_name: str | None = setting(None, "what clients call it; unset takes the folder's name")
    dtype: str = dtype_setting()
    quantization: str | None = quantization_setting()
    device: str = setting("cpu", "where stages compute", choices=DEVICES)
    stages: int = setting(1, "inter-layer partitions, a process each", least=1)
    tensor: int = setting(1, "ranks inside each stage", least=1)
    replicas: int = setting(1, "groups, each with all stages and a scheduler", least=1)
    gateways: int = setting(
        1, "gateways, at the port of the HTTP API and those behind it; a stream goes on at any of them", least=1
    )
    slots: int | None = setting(
        None, "KV slots of a group, in tokens; unset takes what memory allows", least=DEFAULT_BLOCK_TOKENS
    )
    threads: int = setting(
        0,
        "computing threads of a rank; 0 divides the processors, where there are more than two all but one, by the"
        " ranks; a small model gets one thread",
        least=0,
    )
    max_batch_tokens: int | None = setting(
        None,
        "most tokens in a step, prompts run in chunks; unset is 256 on cpu, or twice the batch size where that is more,"
        " and 0 on cuda: prompts whole, as in the paper",
        least=0,
    )
    prefetch: int | None = setting(
        None,
        "1 submits one more batch before the oldest was read, 0 is Algorithm 1; unset is 0 for one stage of a model of"
        " 200 M parameters and more where the other parts have no processor of their own (as commit_interval_ms),"
        " else 1",
        least=0,
    )
    commit_interval_ms: int | None = setting(
        None,
        "milliseconds from one commit of tokens to the next, twice as many while requests queue for a place; first"
        " tokens and ends wait only where they do and theirs, without a deadline, was submitted sixteen times as long"
        " ago; unset is 50 on one or two processors, and where threads compute on all of them, else 0",
        least=0,
    )
    host: str = setting("127.0.0.1", "address of the HTTP API")
    open_to_network: bool = setting(False, "serve without keys at a host that other machines reach")
    port: int = setting(8000, "port of the HTTP API; 0 takes a free one", least=0)
    api_keys: tuple[str, ...] = setting(
        (),
        f"keys of which clients must show one; unset leaves the API open; unseen by ps as {KEYS_VARIABLE}",
        is_secret=True,
    )
    api_keys_file: str | None = setting(
        None, "file of hashed keys with their limits, a line each (`orca keys make`), followed when it changes"
    )
    slo_enforce: bool = setting(
        False, "end a request that has missed the latency goals of its x-slo headers; else they are judged and counted"
    )
    data: str | None = setting(None, "folder of Redis data and logs; unset takes ~/.local/state/orca/PORT")
    redis_url: str | None = setting(None, "a Redis that runs already; unset starts one")
    redis_fsync: str = setting(
        "everysec",
        "when what was accepted is on the disk of the Redis that is started: always is before each answer, some"
        " milliseconds; everysec may lose the last two seconds to a power cut; to a kill of Redis neither loses"
        " anything",
        choices=("everysec", "always"),
    )
    # Three periods of silence are seen after 6 to 8 s: above the 5 s after which a controller ends a frozen rank, for
    # it is nearer to the fault; and far above any pause of a healthy part: none computes, loads weights or waits for a
    # step in its loop.
    probe_s: float = setting(
        2.0,
        "seconds between two questions to each part whether its event loop still turns; who answers nothing for three"
        " times as long is frozen: it is killed and started again, Redis only woken. 0 asks nobody",
        least=0,
    )
    iteration_log: str | None = setting(
        None, "folder that gets a file of each process, one JSON line per step; unset writes none"
    )
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        # super() does not find the class of a record with slots.
        BatchingSettings.__post_init__(self)
        require(self.prefetch in (None, 0, 1), self, "prefetch", "0 or 1")
        most = PORT_MAX - self.gateways + 1
        behind = "" if self.gateways == 1 else f", with {self.gateways} gateways"
        require(self.port <= most, self, "port", f"{most} or less{behind}")
        require(self.served_name is None or bool(self.served_name.strip()), self, "served_name", "a name")
        require(self.quantization is None or self.device == "cpu", self, "quantization", "for --device cuda")
        require(self.model is None or bool(self.model.strip()), self, "model", "a folder or a name on the hub")
        if not (is_loopback(self.host) or self.has_keys or self.open_to_network):
            raise SettingError(
                f"--host {self.host} can be reached from outside and there are no API keys: give --api-keys-file"
                " (`orca keys make NAME` makes a key) or --api-keys, or say --open-to-network true"
            )

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def ranks(self) -> int:
        """Of all groups."""
        return self.replicas * self.stages * self.tensor


def parse_settings(argv: Sequence[str]) -> UpSettings:
    """Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        UpSettings,
        argv,
        {name: keys for name, keys in os.environ.items() if name in (KEYS_VARIABLE, KEYS_FILE_VARIABLE)},
        prefix=GATEWAY_PREFIX,
        prog="orca up",
        description="Start Redis, gateway, schedulers and stage workers on this machine. Ctrl-C ends all of them.",
    )
