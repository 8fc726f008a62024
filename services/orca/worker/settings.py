"""The settings of a stage worker: `--stages 2` or `ORCA_WORKER_STAGES=2` (see core.process.settings)."""

import dataclasses
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from orca.core.domain.errors import SettingError
from orca.core.domain.model import DTYPES, QUANTIZATIONS
from orca.core.process.settings import (
    check_bounds,
    is_address,
    log_format_setting,
    log_level_setting,
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
from orca.worker.machine import available_processors

DEVICES = ("cpu", "cuda")
LINKS = ("auto", "gloo", "nccl")
PREFIX = "ORCA_WORKER_"


def dtype_setting() -> Any:
    """Of a worker, and of whoever starts some; as the next."""
    help_text = (
        "type of activations and KV cache, and of weights; a cpu leaves those of half precision so in float32, too"
    )
    return setting("float32", help_text, choices=DTYPES)


def quantization_setting() -> Any:
    help_text = "what matrices are rounded to, on cpu only; unset leaves them in dtype"
    return setting(None, help_text, choices=QUANTIZATIONS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything that a controller and its ranks are told at start."""

    model: str = required("folder of the model: config.json, *.safetensors, tokenizer.json")
    stage: int = setting(0, "index of this inter-layer partition, from 0", least=0)
    stages: int = setting(1, "inter-layer partitions of the group", least=1)
    tensor: int = setting(1, "ranks inside the stage (intra-layer partitions), one process each", least=1)
    listen: str = setting("127.0.0.1:0", "host:port of the controller's gRPC server; port 0 takes a free one")
    # Beside gRPC: with certificates a kubelet could not ask there.
    health_listen: str | None = setting(
        None, "host:port of /health, plain HTTP answered by the controller; port 0 takes a free one; unset: none"
    )
    data_host: str = setting(
        "127.0.0.1", "address of this machine on which other stages' ranks reach its ranks; only Gloo asks for it"
    )
    network_interface: str | None = setting(
        None, "interface that tensors take between ranks; unset: Gloo that of data_host, NCCL what it finds best"
    )
    tls_ca_file: str | None = tls_ca_setting()
    tls_certificate_file: str | None = tls_certificate_setting()
    tls_key_file: str | None = tls_key_setting()
    tls_server_name: str | None = tls_server_name_setting()
    dtype: str = dtype_setting()
    quantization: str | None = quantization_setting()
    device: str = setting("cpu", "cpu, or cuda: rank r then takes the device r of those visible", choices=DEVICES)
    link: str = setting(
        "auto",
        "who carries tensors between ranks; auto is nccl on cuda and gloo on cpu. Gloo on cuda goes through host"
        " memory: slower, for machines where stages share a device",
        choices=LINKS,
    )
    max_model_len: int | None = setting(
        None, "longest prompt + output in tokens; unset takes what the model allows", least=1
    )
    slots_max: int | None = setting(
        None, "most KV slots that this stage offers; unset offers what memory allows", least=1
    )
    memory_share: float = setting(
        0.5,
        "share of the memory left after loading that KV slots may take, over 0 to 1. On cpu the ranks of a stage divide"
        " it, and those of all stages where data_host is a loopback address, for then all are on this machine. Of other"
        " groups on the machine, or other stages on one GPU, a stage knows nothing: give each its part",
    )
    threads: int = setting(
        0, "computing threads of each rank; 0 divides the processors it may use by the ranks of one stage", least=0
    )
    rank_silent_s: float = setting(
        5.0,
        "a loaded rank is killed and restarted when it is not heard for so long, or does not get through a layer in"
        " this time for each 1,024 tokens of its step, seconds",
        least=0.001,
    )
    loading_silent_s: float = setting(
        60.0,
        "a rank that loads is killed and restarted when it has neither computed nor read another tensor for so long,"
        " seconds; loading as a whole may take any time",
        least=0.001,
    )
    iteration_log: str | None = setting(None, "file that gets one JSON line per step with its times; unset writes none")
    delay_ms: float = setting(0.0, "test setting: computation of each step takes so much longer, milliseconds", least=0)
    log_format: str = log_format_setting()
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        check_bounds(self)
        TlsFiles.of(self)
        require(self.stage < self.stages, self, "stage", f"from 0 to stages - 1 = {self.stages - 1}")
        require(0.0 < self.memory_share <= 1.0, self, "memory_share", "over 0, at most 1")
        require(is_address(self.listen), self, "listen", "host:port")
        require(self.health_listen is None or is_address(self.health_listen), self, "health_listen", "host:port")
        require(self.quantization is None or self.device == "cpu", self, "quantization", "for the device cuda")
        require(self.link != "nccl" or self.device == "cuda", self, "link", "for the device cpu: it joins GPUs only")

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def uses_nccl(self) -> bool:
        return self.link == "nccl" or (self.link == "auto" and self.device == "cuda")

    @property
    def ranks_on_machine(self) -> int:
        """Ranks of this group known to be on this machine: all of them where none could be reached from another."""
        return self.tensor * (self.stages if _is_loopback(self.data_host) else 1)

    @property
    def threads_per_rank(self) -> int:
        return self.threads or max(1, available_processors() // self.tensor)


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> WorkerSettings:
    """Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        WorkerSettings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca worker",
        description="Serve one stage of a model.",
    )


def check_machine(settings: WorkerSettings) -> None:
    """Raises: SettingError that names a setting which this machine cannot serve."""
    interfaces = [name for _, name in socket.if_nameindex()]
    wanted = settings.network_interface
    if wanted is not None and wanted not in interfaces:
        message = f"setting --network-interface: {wanted!r} is not one of this machine: {', '.join(interfaces)}"
        raise SettingError(message)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: whose, only the network knows
