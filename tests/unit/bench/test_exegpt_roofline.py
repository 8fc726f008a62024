"""The time of a step from data sheets: each part by hand for a model of simple numbers."""

from dataclasses import replace

import pytest

from orca.bench.exegpt.roofline import (
    Efficiencies,
    GpuData,
    PaperModel,
    RooflineCost,
    gpu_data,
    kv_slots,
    paper_models,
    roofline_costs,
)
from orca.planner.profile.step_shape import LikeRows, StepShape

GPU = GpuData(
    tflops=1.0,
    memory_gb=1.0,
    memory_gb_per_s=1.0,
    link_gb_per_s=0.1,
    between_nodes_gb_per_s=0.01,
    devices_per_node=2,
    source="made up",
)
FULL = Efficiencies(arithmetic=1.0, memory=1.0, links=1.0)
SMALL = PaperModel(encoder_layers=0, layers=4, hidden=100, heads=10, head_dim=10, wide=400, vocabulary=1000)
BOTH = replace(SMALL, encoder_layers=4)


def seconds(cost: RooflineCost, shape: StepShape) -> float:
    return cost.shape_us(shape) / 1e6


def test_a_few_rows_take_the_time_of_reading_the_weights() -> None:
    (cost,) = roofline_costs(SMALL, GPU, FULL, stages=1, ranks=1)
    layers, head = 4 * 120_000 * 2 / 1e9, 100_000 * 2 / 1e9
    assert seconds(cost, StepShape(increments=1, sampled=1)) == pytest.approx(layers + head)
    # Attention reads keys and values of 100 numbers each, in each of 4 layers.
    assert seconds(cost, StepShape(increments=2, context=50, sampled=1)) == pytest.approx(
        layers + head + 4 * 2 * 50 * 2 * 100 * 2 / 1e9
    )


def test_many_rows_take_the_time_of_their_arithmetic() -> None:
    (cost,) = roofline_costs(SMALL, GPU, FULL, stages=1, ranks=1)
    dense = 4 * 2 * 10_000 * 120_000 / 1e12
    attention = 4 * 10 * 4 * 100 * 1000 * 500 / 1e12
    shape = StepShape(prompts=(LikeRows(10, 1000),))
    assert seconds(cost, shape) == pytest.approx(dense + attention)


def test_efficiencies_divide_the_rates() -> None:
    (full,) = roofline_costs(SMALL, GPU, FULL, stages=1, ranks=1)
    (half,) = roofline_costs(SMALL, GPU, replace(FULL, memory=0.5), stages=1, ranks=1)
    shape = StepShape(increments=1)
    assert half.shape_us(shape) == pytest.approx(2 * full.shape_us(shape))


def test_stages_send_and_ranks_reduce() -> None:
    first, second = roofline_costs(SMALL, GPU, FULL, stages=2, ranks=2)
    assert (first.sends, first.has_head, first.crosses_nodes) == (True, False, True)
    assert (second.sends, second.has_head) == (False, True)
    moved = 10 * 100 * 2
    reading = 2 * 120_000 / 2 * 2 / 1e9
    reducing = 2 * 2 * (2 * 1 / 2 * moved) / 0.1e9
    assert seconds(first, StepShape(increments=10)) == pytest.approx(reading + reducing + moved / 0.01e9)
    with pytest.raises(ValueError, match="cannot be divided"):
        roofline_costs(SMALL, GPU, FULL, stages=3, ranks=1)


def test_an_encoder_runs_sources_only() -> None:
    (cost,) = roofline_costs(BOTH, GPU, FULL, stages=1, ranks=1)
    decoding = StepShape(increments=5, context=3, source_context=7, sampled=5)
    entering = replace(decoding, sources=(LikeRows(5, 7),))
    assert cost.shape_us(entering) > cost.shape_us(decoding)
    assert cost.shape_us(StepShape()) == 0.0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("T5 11B", 11.3),
        ("OPT 13B", 12.8),
        ("GPT-3 39B", 39.1),
        ("GPT-3 101B", 101.2),
        ("GPT-3 175B", 174.6),
        ("GPT-3 341B", 340.5),
    ],
)
def test_the_models_of_table_1_have_their_size(name: str, billions: float) -> None:
    assert paper_models()[name].numbers / 1e9 == pytest.approx(billions, abs=0.05)


def test_memory_left_by_the_weights_is_for_the_cache() -> None:
    model, gpu = paper_models()["OPT 13B"], gpu_data()["A40"]
    slots = kv_slots(model, gpu, stages=1, ranks=4)
    assert slots * 40 * model.kv_bytes < 4 * 48e9 - 2 * model.numbers
    assert kv_slots(paper_models()["GPT-3 175B"], gpu, stages=1, ranks=4) == 0
