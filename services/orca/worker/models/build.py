"""Assembles one rank's share of a model: embedding where a stack begins, a run of layers, head on the last stage.

The layers of an encoder-decoder model are one list, encoder before decoder. A stage may hold a run of each stack.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from orca.core.domain.errors import ModelError
from orca.core.domain.model import ModelInfo, load_model_info
from orca.core.domain.step import Step
from orca.kernels.contract.reference import ModelSizes
from orca.kernels.device import kernels_of
from orca.worker.models import gpt2, llama, opt
from orca.worker.models.blocks import ACTIVATIONS, HEAD, Layer, ModelPart
from orca.worker.models.chains import chain, seq2seq_chain
from orca.worker.models.chains.chain_config import ChainConfig, Seq2SeqChainConfig
from orca.worker.models.config import GPT2Config, LlamaConfig, ModelConfig, OPTConfig, load_config
from orca.worker.models.encoder_decoder import bart, t5
from orca.worker.models.encoder_decoder.bart_config import BartConfig
from orca.worker.models.encoder_decoder.encoder_run import EncoderRun, build_encoder_run
from orca.worker.models.encoder_decoder.t5_config import T5Config
from orca.worker.models.family import FamilyParts
from orca.worker.models.model_shape import EncoderDecoderConfig, EncoderDecoderShape
from orca.worker.models.rotary import Rotary
from orca.worker.models.weights import RankWeights
from orca.worker.parallel.shard import Heads, Shard, SingleRank, TensorGroup, heads_of
from orca.worker.weights.gpu_linear import GpuLinear
from orca.worker.weights.int8_linear import INT8_LAYOUTS, Int8PanelLinear, can_multiply_bytes
from orca.worker.weights.layout_cache import remembered_layout
from orca.worker.weights.layout_choice import ChooseLayout, LayoutChooser, always_panels
from orca.worker.weights.linear import Linear
from orca.worker.weights.loader import Checkpoint, Tensors

log = logging.getLogger(__name__)

_LanguageModel = GPT2Config | OPTConfig | LlamaConfig | T5Config | BartConfig

_FAMILIES: dict[type[ModelConfig], FamilyParts] = {
    GPT2Config: gpt2.FAMILY,
    OPTConfig: opt.FAMILY,
    LlamaConfig: llama.FAMILY,
    T5Config: t5.FAMILY,
    BartConfig: bart.FAMILY,
    ChainConfig: chain.FAMILY,
    Seq2SeqChainConfig: seq2seq_chain.FAMILY,
}


@dataclass(slots=True, kw_only=True)
class StageModel:
    """The weights of one rank, and the parts that apply them. Each epoch may replace `group`."""

    info: ModelInfo
    config: ModelConfig
    shard: Shard
    heads: Heads
    dtype: torch.dtype
    device: torch.device
    group: TensorGroup
    numbers: range  # of the stage's layers in the list of all layers: encoder, then decoder
    encoder: EncoderRun | None  # None: the stage has no encoder layers
    # From here on, the decoder of an encoder-decoder model, or the only stack of other models.
    embed: ModelPart | None  # at the stack's first layer: ids [tokens] to [tokens, hidden]
    layers: list[Layer]
    head: ModelPart | None  # last stage: [rows, hidden] to float32 [rows, vocab]
    rotary: Rotary | None
    sizes: Sequence[ModelSizes]  # of each stack that the stage has layers of
    positions: int | None  # learned positions; None: the model takes any
    windows: tuple[int | None, ...]  # for each layer of the stage
    linears: Sequence[Linear]  # in the order of their use
    weight_bytes: int
    bytes_read: int  # from the files, in the dtypes of the files

    @property
    def encoder_layers(self) -> int:
        """Layers of the whole encoder; 0 for a decoder-only model."""
        return self.config.encoder.layers if isinstance(self.config, EncoderDecoderShape) else 0

    def rows_in(self, step: Step) -> int:
        """Return how many rows of activations the stage before sends for a step: sources, then targets.

        Targets begin at the decoder's first layer. The encoder output of the step's sources goes on from there.
        """
        return self._rows_before(self.numbers.start, step)

    def rows_out(self, step: Step) -> int:
        """Return how many rows of activations a step sends to the next stage; 0 on the last one."""
        return 0 if self.shard.is_last else self._rows_before(self.numbers.stop, step)

    def _rows_before(self, layer: int, step: Step) -> int:
        if layer == 0:
            return 0
        return step.tokens if layer > self.encoder_layers else step.source_tokens

    @property
    def kv_bytes_per_slot(self) -> int:
        """KV memory of one token on this rank; 0 if it has only encoder layers."""
        per_layer = 2 * self.heads.num_kv * self.config.head_dim
        return len(self.layers) * per_layer * torch.empty(0, dtype=self.dtype).element_size()


def prepare_kernels(info: ModelInfo, shard: Shard, device: torch.device) -> bool:
    """Compile the kernels of a rank before `load_stage`, which then finds them compiled.

    Returns: as Kernels.prepare.
    Raises: ModelError for a config of a model that Orca does not know; if kernels depend on the weight files, also for
        files that are no whole safetensors files.
    """
    config, kind = load_config(info.folder), getattr(torch, info.dtype)

    def stored_dtype() -> torch.dtype:
        return Checkpoint(info.folder, dtype=kind, device=device).stored_dtype

    kept_in = _kept_in(stored_dtype, kind, device)
    return prepare_each(_sizes(info, config, shard, kind, kept_in, device))


def prepare_each(sizes: Sequence[ModelSizes]) -> bool:
    """Compile the kernels of each stack of a rank. Returns: as Kernels.prepare, for all of them."""
    have_compiled = [kernels_of(each.device).prepare(each) for each in sizes]
    return any(have_compiled)


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
        model: the answer of `load_model_info`, or a folder.
        shard: the rank's place; by default the whole model.
        dtype: of the computation; by default the info's own, float32 for a folder.
        quantization: type that the matrices of a folder are rounded to; an info has its own.
        group: exchanges tensors among the ranks of the stage; required for more than one rank.
        on_progress: called with the share of the weights read so far, in permille, up to 1000.
        packs: True lays weights out for the device, on a CPU in the fastest layout (worker.weights.layout_choice);
            False leaves them plain; a class is the layout of all. Weights of 8 bits have layouts of their own.
    Raises: ModelError that names the file, and the option or tensor, that cannot be served.
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
    """Build one rank's share of a model from its config and tensors: `load_stage` without the folder.

    Args:
        checkpoint: gives tensors on `device`, of `dtype` unless asked for another one; it is closed at the end.
    Raises: ModelError.
    """
    shard = shard or Shard()
    family = _FAMILIES[type(config)]
    kept_in = _kept_in(lambda: checkpoint.stored_dtype, dtype, device)
    sizes = _sizes(info, config, shard, dtype, kept_in, device)
    prepare_each(sizes)
    layouts = _layouts(info, device, packs, dtype, kept_in, _is_together(config, shard))
    weights = RankWeights(checkpoint, shard, layouts, kept_in)
    prefix = checkpoint.prefix(family.prefixes, family.probe, HEAD if config.is_tied else None)
    if not isinstance(config, ChainConfig | Seq2SeqChainConfig):
        config = _tied_as_the_files_are(checkpoint, config, f"{prefix}{family.probe}", shard)
    numbers = shard.layers(config.num_layers)
    first = config.encoder.layers if isinstance(config, EncoderDecoderShape) else 0  # of the decoder
    checkpoint.expected_bytes = _expected_bytes(checkpoint, family, prefix, shard, numbers, first)
    embed = table = encoder = None
    if family.encoder is None:
        if shard.is_first:
            embed = family.embedding(weights, config, prefix)
            table = embed.table
    elif shard.is_first or first in numbers:
        table = family.encoder.table(weights, config, prefix)
        embed = family.embedding(weights, config, prefix, table) if first in numbers else None
    if family.encoder is not None and numbers.start < first:
        assert isinstance(config, EncoderDecoderShape)
        source_embed = family.encoder.embedding(weights, config, prefix, table) if shard.is_first else None
        own = range(numbers.start, min(numbers.stop, first))
        encoder = build_encoder_run(weights, config, family.encoder, prefix, own, source_embed)
    layers = []
    for index, number in enumerate(range(max(numbers.start, first) - first, numbers.stop - first)):
        layers.append(family.layer(weights, config, prefix, number=number, index=index))
        checkpoint.refuse_unread(f"{prefix}{family.layers}.{number}.", family.ignored)
    head = None
    if shard.is_last:
        tied = table.head if config.is_tied and table is not None else None
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
        numbers=numbers,
        encoder=encoder,
        embed=embed,
        layers=layers,
        head=head,
        sizes=sizes,
        positions=config.max_positions if isinstance(config, GPT2Config | OPTConfig) else None,
        rotary=Rotary(config.rope, config.head_dim, device) if isinstance(config, LlamaConfig) else None,
        windows=tuple(config.windows[number] for number in numbers if number >= first),
        linears=weights.linears,
        weight_bytes=weights.bytes,
        bytes_read=checkpoint.bytes_read,
    )


def _tied_as_the_files_are(checkpoint: Tensors, config: _LanguageModel, embedding: str, shard: Shard) -> _LanguageModel:
    """Return a config that ties the head unless the files have a head of its own, with other numbers.

    Such files and their config contradict each other. transformers believes the files.
    """
    if not (config.is_tied and shard.is_last):
        return config
    dim = config.embedding_dim if isinstance(config, OPTConfig) else config.hidden_size
    span = shard.slice(config.vocab_size, "vocabulary entries")
    if checkpoint.other_than(embedding, (HEAD,), (config.vocab_size, dim), span) is None:
        return config
    log.warning(
        "config.json ties the head to the embedding, but the files have a %s that differs from %s: it is used, as in "
        "transformers; tie_word_embeddings: false would say so",
        HEAD,
        embedding,
    )
    return replace(config, is_tied=False)


def _kept_in(stored_dtype: Callable[[], torch.dtype], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that matrices are read in, and kept in unless they are rounded to 8 bits.

    It is the dtype of the files if a CPU computes in float32, which can leave half precision so; otherwise `dtype`.

    Args:
        stored_dtype: reads the files' dtype; called only if that matters.
    """
    return stored_dtype() if dtype == torch.float32 and device.type == "cpu" else dtype


def _is_together(config: ModelConfig, shard: Shard) -> bool:
    """Return whether layers consist of kernels only if their weights are in panels (blocks.py, `only_kernels`)."""
    return shard.tensor == 1 and not isinstance(config, ChainConfig | Seq2SeqChainConfig)


def _sizes(
    info: ModelInfo,
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    kept_in: torch.dtype,
    device: torch.device,
) -> tuple[ModelSizes, ...]:
    """Return the sizes of each stack of the rank, which decide which kernels its layers need."""
    sizes = _decoder_sizes(info, config, shard, dtype, kept_in, device)
    if not isinstance(config, EncoderDecoderShape):
        return (sizes,)
    numbers, stacks = shard.layers(config.num_layers), []
    if numbers.start < config.encoder.layers:
        heads = heads_of(shard, config.encoder.heads, config.encoder.heads)
        first, last = shard.slice(config.encoder.intermediate_size, "MLP columns") if sizes.intermediate else (0, 0)
        stacks.append(
            replace(
                sizes,
                heads=heads.num_query,
                kv_heads=heads.num_kv,
                kv_of_query=heads.kv_of_query,
                head_dim=config.encoder.head_dim,
                intermediate=last - first,
                windows=(),
                is_causal=False,
                vocab=0,
            )
        )
    if numbers.stop > config.encoder.layers:
        stacks.append(replace(sizes, has_cross_attention=True))
    return tuple(stacks)


def _decoder_sizes(
    info: ModelInfo,
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    kept_in: torch.dtype,
    device: torch.device,
) -> ModelSizes:
    """Return the sizes of a decoder, or of a model's only stack. A model of hashes (chains/) needs only attention."""
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
    if isinstance(config, ChainConfig | Seq2SeqChainConfig):
        return sizes
    columns = config.decoder.intermediate_size if isinstance(config, EncoderDecoderConfig) else config.intermediate_size
    first, last = shard.slice(columns, "MLP columns")
    sizes = replace(
        sizes,
        is_layer_norm=isinstance(config, GPT2Config | OPTConfig | BartConfig),
        intermediate=last - first,
        activation=ACTIVATIONS[config.activation],
        is_gated=config.is_gated if isinstance(config, T5Config) else isinstance(config, LlamaConfig),
    )
    if isinstance(config, T5Config):
        return replace(sizes, has_distance_bias=True)
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


def _layouts(
    info: ModelInfo,
    device: torch.device,
    packs: bool | type[Linear],
    dtype: torch.dtype,
    kept_in: torch.dtype,
    is_together: bool,
) -> LayoutChooser:
    if info.quantization is None:
        only = packs if isinstance(packs, type) else None
        if only is None and device.type != "cpu":
            only = GpuLinear
        choose: ChooseLayout = (
            partial(remembered_layout, is_together=is_together) if kept_in == dtype else always_panels
        )
        return LayoutChooser(is_on=bool(packs), only=only, choose=choose, dtype=dtype)
    if device.type != "cpu":
        raise ModelError(f"quantization {info.quantization} is for the device cpu, not {device.type}")
    if not can_multiply_bytes():
        log.info("weights of 8 bits: %s, because this processor does not multiply bytes", Int8PanelLinear.__name__)
        return LayoutChooser(only=Int8PanelLinear, dtype=dtype)
    choose = partial(remembered_layout, dtype=dtype, layouts=INT8_LAYOUTS, is_together=is_together)
    return LayoutChooser(small=INT8_LAYOUTS.first, choose=choose, dtype=dtype)


def _expected_bytes(
    checkpoint: Tensors, family: FamilyParts, prefix: str, shard: Shard, numbers: range, first: int
) -> int:
    """Estimate the bytes that this rank reads: its layers and vocabulary matrices, divided by the ranks.

    Args:
        first: layer of the decoder, in the list of all layers.
    """
    names = [f"{prefix}{family.layers}.{number - first}." for number in numbers if number >= first]
    if family.encoder is not None:
        names += [f"{prefix}{family.encoder.layers}.{number}." for number in numbers if number < first]
    if shard.is_first or shard.is_last or first in numbers:
        names.append(f"{prefix}{family.probe}")
    if shard.is_last:
        names.append("lm_head.")
    return checkpoint.stored_bytes(names) // shard.tensor


def _group(group: TensorGroup | None, shard: Shard) -> TensorGroup:
    if shard.tensor == 1:
        return SingleRank()  # of all groups that exchange nothing, blocks.py tests for this one
    if group is None:
        raise ModelError(f"{shard.tensor} ranks in a stage need a tensor group")
    return group
