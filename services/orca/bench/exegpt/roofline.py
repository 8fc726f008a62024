"""The time of a step on a GPU that is not at hand, from the shape of the model and the data sheet of the device.

Each part of a step takes the longer of two times: that of its arithmetic at the device's peak rate, and that of its
bytes at the memory's bandwidth. Messages between devices take their bytes at the bandwidth of the link. Each of these
three rates is multiplied by an efficiency, which a measured point of a paper decides. Everything is in FP16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import orjson

from orca.planner.profile.step_shape import LikeRows, StepShape

_BYTES = 2
"""Bytes of a number in FP16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuData:
    """The data sheet of a device and of the links between devices, in units of its file."""

    tflops: float
    memory_gb: float
    memory_gb_per_s: float
    link_gb_per_s: float  # within a node
    between_nodes_gb_per_s: float
    devices_per_node: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """The shape of one of the paper's models (Table 1)."""

    encoder_layers: int  # 0 for a decoder-only model
    layers: int  # of the decoder, or of the only stack
    hidden: int
    heads: int
    head_dim: int
    wide: int  # width of the feed-forward part
    vocabulary: int

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def attention_numbers(self) -> int:
        """Weights of the four matrices of an attention block."""
        return 4 * self.hidden * self.attention_width

    @property
    def encoder_numbers(self) -> int:
        """Weights of an encoder layer, which has one attention block."""
        return self.attention_numbers + 2 * self.hidden * self.wide

    @property
    def decoder_numbers(self) -> int:
        """Weights of a decoder layer. With an encoder, it has a second attention block, over the source."""
        blocks = 2 if self.encoder_layers else 1
        return blocks * self.attention_numbers + 2 * self.hidden * self.wide

    @property
    def kv_bytes(self) -> int:
        """KV bytes of a token in one layer and one attention block."""
        return 2 * self.attention_width * _BYTES

    @property
    def numbers(self) -> int:
        """Weights of the whole model, embeddings included."""
        layers = self.encoder_layers * self.encoder_numbers + self.layers * self.decoder_numbers
        return layers + self.vocabulary * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """The shares of the peak rates that real steps reach."""

    arithmetic: float
    memory: float
    links: float


@cache
def gpu_data() -> Mapping[str, GpuData]:
    """Return the data of each device by its name."""
    return {name: GpuData(**values) for name, values in _read("devices.json").items()}


@cache
def paper_models() -> Mapping[str, PaperModel]:
    """Return the shape of each model by its name."""
    return {name: PaperModel(**values) for name, values in _read("models.json").items() if name != "source"}


def _read(name: str) -> dict[str, Any]:
    found = orjson.loads(resources.files("orca.bench.exegpt").joinpath(name).read_bytes())
    assert isinstance(found, dict)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """The cost of one stage (planner.profile.step_shape.ShapeCost).

    The stage has some layers of each stack, and `ranks` devices that share each of them. The last stage has the output
    head.
    """

    model: PaperModel
    gpu: GpuData
    efficiencies: Efficiencies
    encoder_layers: int
    layers: int
    ranks: int
    has_head: bool
    sends: bool  # its output goes to another stage
    crosses_nodes: bool = False  # that stage is on another node

    def shape_us(self, shape: StepShape) -> float:
        """Return the time of the stage in microseconds."""
        if not shape.tokens and not shape.source_tokens:
            return 0.0
        seconds = self._encoder_s(shape) + self._decoder_s(shape)
        if self.has_head and shape.sampled:
            seconds += self._dense_s(shape.sampled, self.model.vocabulary * self.model.hidden)
        if self.sends:
            seconds += self._send_s(shape.tokens or shape.source_tokens)
        return seconds * 1e6

    def _encoder_s(self, shape: StepShape) -> float:
        if not self.encoder_layers or not shape.source_tokens:
            return 0.0
        layer = self._dense_s(shape.source_tokens, self.model.encoder_numbers)
        layer += sum(self._prompt_attention_s(rows, is_causal=False) for rows in shape.sources)
        return self.encoder_layers * (layer + 2 * self._all_reduce_s(shape.source_tokens))

    def _decoder_s(self, shape: StepShape) -> float:
        if not self.layers or not shape.tokens:
            return 0.0
        model = self.model
        layer = self._dense_s(shape.tokens, model.decoder_numbers)
        layer += sum(self._prompt_attention_s(rows, is_causal=True) for rows in shape.prompts)
        layer += self._memory_s(shape.increments * shape.context * model.kv_bytes)
        if model.encoder_layers:
            layer += self._memory_s(shape.tokens * shape.source_context * model.kv_bytes)
            if shape.source_tokens:  # keys and values of the new sources
                layer += self._dense_s(shape.source_tokens, model.attention_numbers // 2)
        reductions = 3 if model.encoder_layers else 2  # ExeGPT, section 2
        return self.layers * (layer + reductions * self._all_reduce_s(shape.tokens))

    def _dense_s(self, rows: float, numbers: float) -> float:
        """Return the time of `rows` through matrices with so many weights, split over the ranks."""
        share = numbers / self.ranks
        return max(self._arithmetic_s(2 * rows * share), self._memory_s(share * _BYTES, is_split=False))

    def _prompt_attention_s(self, rows: LikeRows, *, is_causal: bool) -> float:
        read = rows.start + (rows.count / 2 if is_causal else rows.count)
        return self._arithmetic_s(4 * self.model.attention_width * rows.requests * rows.count * read / self.ranks)

    def _arithmetic_s(self, operations: float) -> float:
        return operations / (self.gpu.tflops * 1e12 * self.efficiencies.arithmetic)

    def _memory_s(self, moved: float, *, is_split: bool = True) -> float:
        """Return the time of reading so many bytes. Args: is_split: each rank reads its part of them."""
        return moved / (self.ranks if is_split else 1) / (self.gpu.memory_gb_per_s * 1e9 * self.efficiencies.memory)

    def _all_reduce_s(self, rows: float) -> float:
        """Return the time of a ring all-reduce of `rows` activations over the ranks of a node."""
        if self.ranks == 1:
            return 0.0
        moved = 2 * (self.ranks - 1) / self.ranks * rows * self.model.hidden * _BYTES
        return moved / (self.gpu.link_gb_per_s * 1e9 * self.efficiencies.links)

    def _send_s(self, rows: float) -> float:
        rate = self.gpu.between_nodes_gb_per_s if self.crosses_nodes else self.gpu.link_gb_per_s
        return rows * self.model.hidden * _BYTES / (rate * 1e9 * self.efficiencies.links)


def roofline_costs(
    model: PaperModel, gpu: GpuData, efficiencies: Efficiencies, *, stages: int, ranks: int
) -> tuple[RooflineCost, ...]:
    """Return the cost of each stage. Each has an equal share of the encoders and of the decoders (ExeGPT, section 4.1).

    Raises: ValueError if the layers cannot be divided equally.
    """
    if model.layers % stages or model.encoder_layers % stages:
        raise ValueError(f"{model.encoder_layers} and {model.layers} layers cannot be divided over {stages} stages")
    stages_per_node = max(1, gpu.devices_per_node // ranks)
    return tuple(
        RooflineCost(
            model=model,
            gpu=gpu,
            efficiencies=efficiencies,
            encoder_layers=model.encoder_layers // stages,
            layers=model.layers // stages,
            ranks=ranks,
            has_head=stage == stages - 1,
            sends=stage < stages - 1,
            crosses_nodes=(stage + 1) % stages_per_node == 0,
        )
        for stage in range(stages)
    )


def kv_slots(model: PaperModel, gpu: GpuData, *, stages: int, ranks: int, reserve: float = 0.1) -> int:
    """Return the KV slots that fit into the memory left by the weights, of which `reserve` is kept for activations.

    Slots are tokens of a target or of a source, each with its own blocks.
    """
    left = gpu.memory_gb * 1e9 * stages * ranks * (1 - reserve) - model.numbers * _BYTES
    return max(0, int(left / (model.layers * model.kv_bytes)))
