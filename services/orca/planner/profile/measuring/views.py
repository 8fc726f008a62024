"""Parts of a loaded model, as stages that share its weights: they differ by whole layers, embedding, and head."""

from dataclasses import replace

from orca.planner.profile.measuring.points import View
from orca.worker.models.build import StageModel


def view_of(model: StageModel, view: View) -> StageModel:
    """Return the part of a whole model that a view runs. Args: model: all of its layers, on one rank of one stage."""
    shard, encoder = model.shard, model.encoder_layers
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
    count = len(model.layers)
    if view is View.FEWER:
        count = fewer_layers(model)
    elif view in (View.EMBEDDED, View.BARE, View.KEPT):
        count = 1
    # A stage that begins the decoder gets the encoder output of new sources from the stage before.
    before = 1 if encoder else 0
    first = encoder if view is not View.BARE else encoder + 1  # any layer that does not begin the decoder
    is_last = view in (View.HEADED, View.KEPT)
    stages = before + 1 if is_last else 3
    return replace(
        model,
        shard=replace(shard, stage=1 if view is View.BARE else before, stages=stages),
        encoder=None,
        embed=None if view is View.BARE else model.embed,
        layers=model.layers[:count],
        head=model.head if is_last else None,
        windows=model.windows[:count],
        numbers=range(first, first + count),
    )


def fewer_layers(model: StageModel) -> int:
    """Return the number of layers of the view FEWER; 0 if there is none, because the decoder has one layer."""
    return len(model.layers) // 2
