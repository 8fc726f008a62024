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
    """Return the field `dtype`, which the worker shares with the programs that start workers."""
    help_text = (
        "data type of activations, KV cache and weights; with float32 on cpu, half-precision weights stay half"
        " precision in memory"
    )
    return setting("float32", help_text, choices=DTYPES)


def quantization_setting() -> Any:
    """Return the field `quantization`, shared in the same way."""
    help_text = "data type that weight matrices are rounded to, on cpu only; unset: they stay in dtype"
    return setting(None, help_text, choices=QUANTIZATIONS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a controller and its ranks."""

    model: str = required("model folder with config.json, *.safetensors and tokenizer.json")
    stage: int = setting(0, "index of this stage (inter-layer partition), from 0", least=0)
    stages: int = setting(1, "number of stages (inter-layer partitions) of the group", least=1)
    layers: str | None = setting(
        None,
        "number of layers of each stage, comma-separated, stage 0 first, such as 10,6,8; every stage of the group needs"
        " the same value; an encoder's layers come before its decoder's; unset: as even as possible, the first"
        " stages hold one more",
    )
    tensor: int = setting(1, "number of ranks (intra-layer partitions) of the stage, one process each", least=1)
    listen: str = setting("127.0.0.1:0", "host:port of the controller's gRPC server; port 0: any free port")
    # A port of its own: with certificates on the gRPC port, a kubelet could not probe there.
    health_listen: str | None = setting(
        None, "host:port where the controller serves /health over plain HTTP; port 0: any free port; unset: no /health"
    )
    data_host: str = setting(
        "127.0.0.1", "address of this machine at which ranks of other stages reach its ranks; used by Gloo only"
    )
    network_interface: str | None = setting(
        None,
        "network interface for tensors between ranks; unset: Gloo uses the interface of data_host, NCCL chooses one",
    )
    tls_ca_file: str | None = tls_ca_setting()
    tls_certificate_file: str | None = tls_certificate_setting()
    tls_key_file: str | None = tls_key_setting()
    tls_server_name: str | None = tls_server_name_setting()
    dtype: str = dtype_setting()
    quantization: str | None = quantization_setting()
    device: str = setting("cpu", "cpu or cuda; with cuda, rank r uses the visible GPU number r", choices=DEVICES)
    link: str = setting(
        "auto",
        "library that sends tensors between ranks; auto: nccl on cuda, gloo on cpu. gloo on cuda copies through host"
        " memory, which is slower; use it if stages share a GPU",
        choices=LINKS,
    )
    max_model_len: int | None = setting(
        None,
        "most tokens of prompt and output together; unset: as many as the model allows; a model with rotary positions"
        " may get more, with a warning",
        least=1,
    )
    slots_max: int | None = setting(
        None, "most KV slots (tokens in the KV cache) of this stage; unset: as many as memory allows", least=1
    )
    memory_share: float = setting(
        0.5,
        "share of the memory left after loading that KV slots may use, above 0, at most 1. On cpu the ranks of a stage"
        " divide it; if data_host is a loopback address, the ranks of all stages do, because all are on this machine."
        " Ranks with only encoder layers have no KV slots."
        " Other groups on the machine, or other stages on the same GPU, are not counted: give each its share",
    )
    threads: int = setting(
        0, "computing threads of each rank; 0: the processors of the machine divided by the ranks of a stage", least=0
    )
    rank_silent_s: float = setting(
        5.0,
        "seconds after which a loaded rank is killed and restarted if it sends no heartbeat, or does not finish a layer"
        " in this time for each 1,024 tokens of its step",
        least=0.001,
    )
    loading_silent_s: float = setting(
        60.0,
        "seconds after which a loading rank is killed and restarted if it neither computes nor reads another tensor;"
        " loading as a whole may take any time",
        least=0.001,
    )
    iteration_log: str | None = setting(None, "file for one JSON line per step with its times; unset: no file")
    delay_ms: float = setting(0.0, "for tests: milliseconds added to the computation of each step", least=0)
    log_format: str = log_format_setting()
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        check_bounds(self)
        TlsFiles.of(self)
        require(self.stage < self.stages, self, "stage", f"from 0 to stages - 1 = {self.stages - 1}")
        require(0.0 < self.memory_share <= 1.0, self, "memory_share", "above 0, at most 1")
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
    def is_alone_on_machine(self) -> bool:
        """True if all ranks of the group are on this machine: data_host is a loopback address."""
        return _is_loopback(self.data_host)

    @property
    def threads_per_rank(self) -> int:
        return self.threads or max(1, available_processors() // self.tensor)


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> WorkerSettings:
    """Read the settings.

    Raises: SettingError that names the setting; SystemExit only for --help.
    """
    return read_settings(
        WorkerSettings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca worker",
        description="Serve one stage of a model.",
    )


def check_machine(settings: WorkerSettings) -> None:
    """Check settings against this machine.

    Raises: SettingError that names a setting which this machine cannot serve.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    wanted = settings.network_interface
    if wanted is not None and wanted not in interfaces:
        message = (
            f"setting --network-interface: {wanted!r} is not an interface of this machine: {', '.join(interfaces)}"
        )
        raise SettingError(message)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which only the network can resolve
