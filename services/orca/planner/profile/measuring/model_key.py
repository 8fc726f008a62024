"""The key of a profile, from a model's folder and this machine."""

from pathlib import Path

from orca.core.domain.model import ModelInfo
from orca.planner.profile.profile import VERSION, ProfileKey, StackShape
from orca.worker.machine import available_processors
from orca.worker.models.chains.chain_config import ChainConfig
from orca.worker.models.config import ModelConfig, load_config
from orca.worker.models.model_shape import EncoderDecoderShape, Stack

_CPU_FIELDS = ("cpu family", "model", "stepping")


def profile_key(
    info: ModelInfo, *, device: str, threads: int, ranks: tuple[int, ...], devices: int, release: str
) -> ProfileKey:
    """Return the key of a profile of a model on this machine. Raises: ModelError for a config that cannot be served."""
    config = load_config(info.folder)
    return ProfileKey(
        version=VERSION,
        architecture=info.architecture,
        stacks=stacks_of(config),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=info.max_model_len,
        dtype=info.dtype,
        quantization=info.quantization,
        device=device,
        processor=processor_name() if device == "cpu" else gpu_name(),
        processors=available_processors(),
        threads=threads,
        ranks=ranks,
        devices=devices,
        release=release,
    )


def fewest_heads(folder: Path) -> int:
    """Return the attention heads of the stack that has the fewest: ranks divide them. Raises: ModelError."""
    return min(stack.heads for stack in stacks_of(load_config(folder)))


def stacks_of(config: ModelConfig) -> tuple[StackShape, ...]:
    """Return the shapes of a model's stacks: encoder and decoder, or its only one."""
    if isinstance(config, EncoderDecoderShape):
        return _stack(config.encoder, config.encoder.heads), _stack(config.decoder, config.num_kv_heads)
    return (
        StackShape(
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=0 if isinstance(config, ChainConfig) else config.intermediate_size,
        ),
    )


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this machine's processor. Its numbers tell apart those that virtual machines name alike."""
    first = cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0]
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    numbers = "-".join(said[field] for field in _CPU_FIELDS if field in said)
    name = " ".join(said.get("model name", "unknown processor").split())
    return f"{name} ({numbers})" if numbers else name


def gpu_name() -> str:
    """Return the name of the first visible GPU."""
    import torch

    return str(torch.cuda.get_device_name(0))


def _stack(stack: Stack, kv_heads: int) -> StackShape:
    return StackShape(
        layers=stack.layers,
        heads=stack.heads,
        kv_heads=kv_heads,
        head_dim=stack.head_dim,
        intermediate_size=stack.intermediate_size,
    )
