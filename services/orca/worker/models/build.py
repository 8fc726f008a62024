"""Assembles one rank's share of a model: embedding on the first stage, a run of layers, head on the last."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from orca.core.domain.errors import ModelError
from orca.core.domain.model import ModelInfo, load_model_info
from orca.kernels.contract.reference import ModelSizes
from orca.kernels.device import kernels_of
from orca.worker.models import chain, gpt2, llama, opt
from orca.worker.models.blocks import ACTIVATIONS, Layer, Part, is_silu
from orca.worker.models.config import ChainConfig, GPT2Config, LlamaConfig, ModelConfig, OPTConfig, load_config
from orca.worker.models.family import Family
from orca.worker.models.rotary import Rotary
from orca.worker.models.weights import Weights
from orca.worker.parallel.shard import Heads, Shard, SingleRank, TensorGroup, heads_of
from orca.worker.weights.gpu_linear import GpuLinear
from orca.worker.weights.int8_linear import INT8_LAYOUTS, Int8PanelLinear, multiplies_bytes
from orca.worker.weights.layout_cache import remembered
from orca.worker.weights.linear import Choose, Linear, Packing, in_panels
from orca.worker.weights.loader import Checkpoint, Tensors

log = logging.getLogger(__name__)

_FAMILIES: dict[type[ModelConfig], Family] = {
    GPT2Config: gpt2.FAMILY,
    OPTConfig: opt.FAMILY,
    LlamaConfig: llama.FAMILY,
    ChainConfig: chain.FAMILY,
}


@dataclass(slots=True, kw_only=True)
class StageModel:
    """The weights of one rank, and how they are applied. `group` may be replaced when the ranks meet anew."""

    info: ModelInfo
    config: ModelConfig
    shard: Shard
    heads: Heads
    dtype: torch.dtype
    device: torch.device
    group: TensorGroup
    embed: Part | None  # first stage: ids [tokens] to [tokens, hidden]
    layers: list[Layer]
    head: Part | None  # last stage: [rows, hidden] to float32 [rows, vocab]
    rotary: Rotary | None
    sizes: ModelSizes
    positions: int | None  # that the model has learned; None: any
    windows: tuple[int | None, ...]  # of the stage's layers
    linears: Sequence[Linear]  # all of them, in the order of their use
    weight_bytes: int
    bytes_read: int  # from the files, in their dtypes

    @property
    def kv_bytes_per_slot(self) -> int:
        """KV memory of one token on this rank."""
        per_layer = 2 * self.heads.num_kv * self.config.head_dim
        return len(self.layers) * per_layer * torch.empty(0, dtype=self.dtype).element_size()


def prepare_kernels(info: ModelInfo, shard: Shard, device: torch.device) -> bool:
    """Compile what a rank will need, ahead of `load_stage`, which then finds it done.

    Returns: as Kernels.prepare.
    Raises: ModelError for a config that names no model of ours, and, where kernels depend on the files, for those that
        are no whole safetensors files.
    """
    config, kind = load_config(info.folder), getattr(torch, info.dtype)

    def stored_dtype() -> torch.dtype:
        return Checkpoint(info.folder, dtype=kind, device=device).stored_dtype

    kept_in = _kept_in(stored_dtype, kind, device)
    return kernels_of(device).prepare(_sizes(info, config, shard, kind, kept_in, device))


def load_stage(
    model: ModelInfo | Path | str,
    shard: Shard | None = None,
    *,
    dtype: str | None = None,
    quantization: str | None = None,
    device: torch.device | str = "cpu",
    group: TensorGroup | None = None,
    on_progress: Callable[[int], None] | None = None,
    packs: bool | type[Linear] = True,
) -> StageModel:
    """Read one rank's share of a model.

    Args:
        model: what `load_model_info` answered, or a folder.
        shard: the rank's place; all of the model by default.
        dtype: what to compute in; the info's own by default, float32 for a folder.
        quantization: what the matrices of a folder are rounded to; an info has its own.
        group: how the ranks of the stage exchange tensors; needed for more than one.
        on_progress: called with the share of the weights read so far, in permille, up to 1000.
        packs: lay weights out for the device, on a CPU as is measured to be fastest (worker.weights.linear); or not; or
        all in
            one layout. Weights of 8 bits have layouts of their own.
    Raises: ModelError naming the file, and the option or tensor, that stands in the way.
    """
    if isinstance(model, ModelInfo):
        info = model
    else:
        info = load_model_info(model, dtype=dtype or "float32", quantization=quantization)
    place = torch.device(device)
    kind: torch.dtype = getattr(torch, dtype or info.dtype)
    config = load_config(info.folder)
    checkpoint = Checkpoint(info.folder, dtype=kind, device=place, on_progress=on_progress)
    built = build_stage(info, config, checkpoint, shard, dtype=kind, device=place, group=group, packs=packs)
    if on_progress is not None:
        on_progress(1000)
    return built


def build_stage(
    info: ModelInfo,
    config: ModelConfig,
    checkpoint: Tensors,
    shard: Shard | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorGroup | None = None,
    packs: bool | type[Linear] = True,
) -> StageModel:
    """One rank's share of a model whose config and tensors are at hand: `load_stage` without the folder.

    Args:
        checkpoint: gives tensors of `dtype`, unless asked for another one, on `device`; it is closed at the end.
    Raises: ModelError.
    """
    shard = shard or Shard()
    family = _FAMILIES[type(config)]
    kept_in = _kept_in(lambda: checkpoint.stored_dtype, dtype, device)
    sizes = _sizes(info, config, shard, dtype, kept_in, device)
    kernels_of(device).prepare(sizes)
    packing = _packing(info, device, packs, dtype, kept_in, _is_together(config, shard))
    weights = Weights(checkpoint, shard, packing, kept_in)
    prefix = checkpoint.prefix(family.prefixes, family.probe)
    numbers = shard.layers(config.num_layers)
    checkpoint.expected_bytes = _expected_bytes(checkpoint, family, prefix, shard, numbers)

    embed = family.embedding(weights, config, prefix) if shard.is_first else None
    layers = []
    for index, number in enumerate(numbers):
        layers.append(family.layer(weights, config, prefix, number=number, index=index))
        checkpoint.refuse_unread(f"{prefix}{family.layers}.{number}.", family.ignored)
    head = None
    if shard.is_last:
        tied = embed.table.head if config.is_tied and embed is not None else None
        head = family.head(weights, config, prefix, tied)
    checkpoint.close()
    log.info("loaded layers %d..%d of %d, %d bytes", numbers[0], numbers[-1], config.num_layers, weights.bytes)
    return StageModel(
        info=info,
        config=config,
        shard=shard,
        heads=heads_of(shard, config.num_heads, config.num_kv_heads),
        dtype=dtype,
        device=device,
        group=_group(group, shard),
        embed=embed,
        layers=layers,
        head=head,
        sizes=sizes,
        positions=config.max_positions if isinstance(config, GPT2Config | OPTConfig) else None,
        rotary=Rotary(config.rope, config.head_dim, device) if isinstance(config, LlamaConfig) else None,
        windows=tuple(config.windows[number] for number in numbers),
        linears=weights.linears,
        weight_bytes=weights.bytes,
        bytes_read=checkpoint.bytes_read,
    )


def _kept_in(stored_dtype: Callable[[], torch.dtype], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What matrices are read in, and lie in where they are not rounded: as the files have them, where a CPU computes in
    float32 and can leave half precision so; else `dtype`. Args: stored_dtype: looks through the files, where that
    matters."""
    return stored_dtype() if dtype == torch.float32 and device.type == "cpu" else dtype


def _is_together(config: ModelConfig, shard: Shard) -> bool:
    """Whether layers are nothing but kernels if their weights are in panels (blocks.py, `only_kernels`)."""
    if shard.tensor > 1 or isinstance(config, ChainConfig):
        return False
    return not isinstance(config, LlamaConfig) or is_silu(config.activation)


def _sizes(
    info: ModelInfo,
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    kept_in: torch.dtype,
    device: torch.device,
) -> ModelSizes:
    """What decides which kernels the layers need. A model of hashes (chain.py) needs no more than attention."""
    heads, numbers = heads_of(shard, config.num_heads, config.num_kv_heads), shard.layers(config.num_layers)
    sizes = ModelSizes(
        dtype=dtype,
        weight_dtype=kept_in if info.quantization is None else getattr(torch, info.quantization),
        table_dtype=kept_in,
        device=device,
        hidden=config.hidden_size,
        heads=heads.num_query,
        kv_heads=heads.num_kv,
        head_dim=config.head_dim,
        kv_of_query=heads.kv_of_query,
        windows=tuple(config.windows[number] for number in numbers),
        vocab=config.vocab_size if shard.is_last and shard.rank == 0 else 0,
    )
    if isinstance(config, ChainConfig):
        return sizes
    first, last = shard.slice(config.intermediate_size, "MLP columns")
    is_llama = isinstance(config, LlamaConfig)
    # Gates of other activations than SiLU are PyTorch's (blocks.GatedMLP).
    has_kernel = not is_llama or is_silu(config.activation)
    sizes = replace(
        sizes,
        is_layer_norm=not is_llama,
        intermediate=last - first,
        activation=ACTIVATIONS[config.activation] if has_kernel else None,
        is_gated=is_llama,
    )
    if isinstance(config, LlamaConfig):
        return replace(
            sizes,
            has_rotary=True,
            has_head_norm=config.has_qk_norm,
            has_qkv_bias=config.has_qkv_bias,
            has_out_bias=config.has_output_bias,
            has_mlp_bias=config.has_mlp_bias,
        )
    has_bias = not isinstance(config, OPTConfig) or config.has_bias
    return replace(sizes, has_qkv_bias=has_bias, has_out_bias=has_bias, has_mlp_bias=has_bias)


def _packing(
    info: ModelInfo,
    place: torch.device,
    packs: bool | type[Linear],
    dtype: torch.dtype,
    kept_in: torch.dtype,
    is_together: bool,
) -> Packing:
    if info.quantization is None:
        only = packs if isinstance(packs, type) else None
        if only is None and place.type != "cpu":
            only = GpuLinear
        choose: Choose = partial(remembered, is_together=is_together) if kept_in == dtype else in_panels
        return Packing(is_on=bool(packs), only=only, choose=choose, dtype=dtype)
    if place.type != "cpu":
        raise ModelError(f"quantization {info.quantization} is for the device cpu, not {place.type}")
    if not multiplies_bytes():
        log.info("weights of 8 bits: %s, for this processor does not multiply bytes", Int8PanelLinear.__name__)
        return Packing(only=Int8PanelLinear, dtype=dtype)
    choose = partial(remembered, dtype=dtype, layouts=INT8_LAYOUTS, is_together=is_together)
    return Packing(small=INT8_LAYOUTS.first, choose=choose, dtype=dtype)


def _expected_bytes(checkpoint: Tensors, family: Family, prefix: str, shard: Shard, numbers: range) -> int:
    """About what this rank reads: its layers and the vocabulary matrices of its ends, divided by the ranks."""
    names = [f"{prefix}{family.layers}.{number}." for number in numbers]
    if shard.is_first or shard.is_last:
        names.append(f"{prefix}{family.probe}")
    if shard.is_last:
        names.append("lm_head.")
    return checkpoint.stored_bytes(names) // shard.tensor


def _group(group: TensorGroup | None, shard: Shard) -> TensorGroup:
    if shard.tensor == 1:
        return SingleRank()  # whatever exchanges nothing: blocks.py asks for this one
    if group is None:
        raise ModelError(f"{shard.tensor} ranks in a stage need a tensor group")
    return group
