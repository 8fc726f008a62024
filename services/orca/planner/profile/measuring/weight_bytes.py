"""The memory of a rank's weights, by parts: found by loading single layers beside the whole model."""

from collections.abc import Callable
from dataclasses import replace

from orca.planner.profile.measuring.process_order import WeightBytes
from orca.worker.models.build import StageModel
from orca.worker.parallel.shard import Shard


def weight_bytes(model: StageModel, load: Callable[[Shard], StageModel]) -> WeightBytes:
    """Return the bytes of each part.

    Models with too few layers to load one without embedding and head count everything as layers.

    Args:
        model: the whole model on one rank.
        load: loads another share of it.
    """
    encoder, total = model.encoder_layers, model.config.num_layers
    decoder = total - encoder

    def bytes_of(stage: int, *counts: int) -> int:
        place = replace(model.shard, stage=stage, stages=len(counts), layer_counts=counts)
        return load(place).weight_bytes

    if encoder and (encoder < 2 or decoder < 3):
        return WeightBytes(layers=(model.weight_bytes // total,) * 2, embed=0, head=0)
    if total < 3:
        return WeightBytes(layers=(model.weight_bytes // total,), embed=0, head=0)
    layers = [bytes_of(1, 1, 1, total - 2)]
    if encoder:
        layers.append(bytes_of(1, encoder + 1, 1, decoder - 2))
    embed = bytes_of(0, 1, total - 1) - layers[0]
    numbers = (encoder, decoder) if encoder else (decoder,)
    in_layers = sum(count * each for count, each in zip(numbers, layers, strict=True))
    head = max(0, model.weight_bytes - embed - in_layers)
    return WeightBytes(layers=tuple(layers), embed=embed, head=head)
