"""Parts of a loaded model, as stages that share its weights: they differ by whole layers, embedding, and head."""

from dataclasses import replace

from orca.planner.profile.measuring.points import View
from orca.worker.models.build import StageModel


def view_of(model: StageModel, view: View) -> StageModel:
    """Return the part of a whole model that a view runs. Args: model: all of its layers, on one rank of one stage."""
    shard, encoder = model.shard, model.encoder_layers
    total = model.config.num_layers
    if view is View.ENCODER:
        return replace(
            model,
            shard=replace(shard, stage=0, stages=2),
            numbers=range(encoder),
            embed=None,
            layers=[],
            head=None,
            windows=(),
        )
    # Behind an encoder, a stage that begins the decoder gets the encoder output of new sources.
    place = replace(shard, stage=1, stages=3) if encoder else replace(shard, stage=0, stages=2)
    decoder = replace(model, shard=place, encoder=None, numbers=range(encoder, total))
    if view is View.HEADED:
        return replace(decoder, shard=replace(shard, stage=1 if encoder else 0, stages=2 if encoder else 1))
    decoder = replace(decoder, head=None)
    if view is View.LAYERS:
        return decoder
    if view is View.BARE:
        after = replace(shard, stage=1, stages=3)
        first = encoder + 1  # any layer that the decoder does not begin with: its rows come from the stage before
        return replace(
            decoder, shard=after, embed=None, layers=model.layers[:1], windows=model.windows[:1],
            numbers=range(first, first + 1),
        )  # fmt: skip
    count = fewer_layers(model) if view is View.FEWER else 1
    return replace(
        decoder,
        layers=model.layers[:count],
        windows=model.windows[:count],
        numbers=range(encoder, encoder + count),
    )


def fewer_layers(model: StageModel) -> int:
    """Return the number of layers of the view FEWER; 0 if there is none, because the decoder has one layer."""
    return len(model.layers) // 2
