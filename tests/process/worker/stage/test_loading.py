"""Loading: each rank reads its slices only, splits of every size, refusals, progress."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from orca.bench.parts.tiny_families import FAMILIES, tiny_checkpoint
from orca.core.domain.errors import ModelError
from orca.worker.models import weights
from orca.worker.models.build import StageModel, load_stage
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard, SingleRank, heads_of, part
from orca.worker.parallel.tensor_link import TensorLink
from orca.worker.weights import layout_choice
from orca.worker.weights.layout_choice import LayoutChooser, best_times_s
from orca.worker.weights.linear import Linear, MklLinear, OneDnnLinear, PanelLinear
from support.worker.stage_driver import Chain, random_asks, serve


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def load(folder: Path, shard: Shard | None = None, **options: Any) -> StageModel:
    return load_stage(folder, shard, group=SingleRank(), packs=False, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_stages_together_read_the_model_once(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path, tie_word_embeddings=False)
    total = sum(tensor.numel() * 4 for tensor in load_file(folder / "model.safetensors").values())
    for stages in (1, 2, 3):
        shards = [Shard(stage=stage, stages=stages) for stage in range(stages)]
        assert sum(load(folder, shard).bytes_read for shard in shards) == total


def test_a_rank_reads_its_slices_and_what_every_rank_needs(original: Path) -> None:
    whole = load(original).bytes_read
    halves = [load(original, Shard(rank=rank, tensor=2)).bytes_read for rank in range(2)]
    norms = 4 * 36 * (2 * 3 + 1)  # float32, hidden size, two norms a layer and the last
    assert sum(halves) == whole + norms
    assert max(halves) < 0.52 * whole


def test_memory_of_the_weights_is_what_was_read(original: Path) -> None:
    for shard in (Shard(), Shard(stage=1, stages=2), Shard(rank=1, tensor=2)):
        model = load(original, shard)
        assert model.weight_bytes == model.bytes_read


def test_tied_weights_are_held_once_if_both_ends_are_on_one_rank(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen2", tmp_path)
    table = 4 * 193 * 28
    both, first, last = (
        load(folder, shard).weight_bytes for shard in (Shard(), Shard(stages=2), Shard(stage=1, stages=2))
    )
    assert both == first + last - table


@pytest.mark.covered(1)
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    ("stored", "dtype", "number_bytes"),
    [(torch.float32, "float32", 4), (torch.bfloat16, "float32", 2), (torch.float32, "bfloat16", 2)],
)
@pytest.mark.parametrize(
    ("family", "options"), [("gpt2", {}), ("opt", {"ffn_dim": 52}), ("qwen2", {"intermediate_size": 52})]
)
def test_a_large_tied_table_is_held_only_as_panels_of_the_head_with_the_same_output(
    family: str,
    options: dict[str, Any],
    stored: torch.dtype,
    dtype: str,
    number_bytes: int,
    tensor: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_checkpoint(family, tmp_path, stored=stored, **options)
    vocab, width = {"gpt2": (211, 24), "opt": (203, 24), "qwen2": (193, 28)}[family]
    outputs, weight_bytes = [], []
    for least in (0, 1 << 40):
        monkeypatch.setattr(weights, "SHARED_BYTES_MIN", least)
        chain = Chain(folder, dtype=dtype, packs=PanelLinear, tensor=tensor)
        asks = random_asks(vocab, 12, seed=15, new_max=8)
        serve(chain, asks)
        outputs.append([ask.output for ask in asks])
        weight_bytes.append(sum(rank._model.weight_bytes for stage in chain.stages for rank in stage))
        chain.close()
    assert outputs[0] == outputs[1]
    assert weight_bytes[1] - weight_bytes[0] == vocab * width * number_bytes


def test_half_precision_takes_half_the_memory(original: Path) -> None:
    assert load(original, dtype="bfloat16").weight_bytes * 2 == load(original).weight_bytes


def test_parts_are_contiguous_and_the_first_ones_take_the_rest() -> None:
    assert [part(10, 4, index) for index in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert [list(Shard(stage=stage, stages=3).layers(5)) for stage in range(3)] == [[0, 1], [2, 3], [4]]


def test_layers_are_divided_as_the_counts_say() -> None:
    shards = [Shard(stage=stage, stages=3, layer_counts=(1, 3, 1)) for stage in range(3)]
    assert [list(shard.layers(5)) for shard in shards] == [[0], [1, 2, 3], [4]]
    assert {shard.layers_by_stage(5) for shard in shards} == {(1, 3, 1)}
    assert Shard(stages=3).layers_by_stage(5) == (2, 2, 1)


def test_a_kv_head_on_the_border_of_two_ranks_is_held_by_both() -> None:
    left, right = (heads_of(Shard(rank=rank, tensor=2), 6, 2) for rank in range(2))
    assert (left.query, left.kv, left.kv_of_query) == ((0, 3), (0, 1), (0, 0, 0))
    left, right = (heads_of(Shard(rank=rank, tensor=2), 10, 2) for rank in range(2))
    assert (right.query, right.kv) == ((5, 10), (1, 2))
    left, middle, right = (heads_of(Shard(rank=rank, tensor=3), 8, 2) for rank in range(3))
    assert (left.kv, middle.kv, right.kv) == ((0, 1), (0, 2), (1, 2))
    assert middle.kv_of_query == (0, 1, 1)


def test_splits_that_do_not_divide_compute_the_same(original: Path) -> None:
    outputs = []
    for tensor in (1, 3, 4, 6):
        asks = random_asks(199, 4, seed=3)
        chain = Chain(original, tensor=tensor)
        serve(chain, asks)
        chain.close()
        outputs.append([ask.output for ask in asks])
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        (Shard(stages=4), "3 layers cannot be split over 4 stages"),
        (Shard(stages=2, layer_counts=(2, 2)), r"layers \(2, 2\) are no division of 3 layers over 2 stages"),
        (Shard(stages=2, layer_counts=(3,)), r"layers \(3,\) are no division of 3 layers over 2 stages"),
        (Shard(stages=2, layer_counts=(3, 0)), r"layers \(3, 0\) are no division of 3 layers over 2 stages"),
        (Shard(tensor=7), "6 attention heads cannot be split over 7 ranks"),
    ],
)
def test_more_parts_than_layers_or_heads_are_refused(original: Path, shard: Shard, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load(original, shard)


def test_ranks_without_a_process_group_are_refused(original: Path) -> None:
    with pytest.raises(ModelError, match="2 ranks in a stage need a tensor group"):
        load_stage(original, Shard(tensor=2))


def test_progress_rises_to_a_thousand(original: Path) -> None:
    heard: list[int] = []
    load(original, Shard(stage=1, stages=2), on_progress=heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == 1000
    assert len(set(heard)) > 5


def test_progress_is_reported_after_every_read(original: Path) -> None:
    heard: list[int] = []
    load(original, on_progress=heard.append)
    assert len(heard) == len(load_file(original / "model.safetensors")) + 1  # and once at the end


def test_an_index_over_several_files_is_followed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part_names in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part_names}, folder / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part_names, f"part-{number}.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load(folder).weight_bytes == sum(tensor.numel() * 4 for tensor in tensors.values())


LAYER = "model.layers.2.self_attn.q_proj.weight"


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[LAYER]


def _misshapen(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LAYER] = tensors[LAYER][:-1].clone()


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LAYER] = tensors[LAYER].to(torch.int8)


def _unknown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.self_attn.q_proj.bias"] = torch.zeros(60)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_without, f"has no tensor {LAYER}"),
        (_misshapen, r"has shape \(59, 36\), the config says \(60, 36\)"),
        (_integers, "is I8, not one of F32"),
        (_unknown, "q_proj.bias in .* has no place in the model"),
    ],
)
def test_a_tensor_that_does_not_fit_the_config_is_refused_by_name(folder: Path, spoil: Any, reason: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    load(folder, Shard(stages=3))  # another stage does not read it
    with pytest.raises(ModelError, match=reason):
        load(folder, Shard(stage=2, stages=3))


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_head_of_its_own_is_used_though_the_config_ties_it(
    tensor: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_checkpoint("qwen2", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tied = tensors["model.embed_tokens.weight"]
    shards = [Shard(rank=rank, tensor=tensor) for rank in range(tensor)]
    save_file(tensors | {"lm_head.weight": tied.clone()}, path)
    assert all(load(folder, shard).config.is_tied for shard in shards)
    assert not any("tie_word_embeddings" in record.getMessage() for record in caplog.records)
    save_file(tensors | {"lm_head.weight": tied + 1}, path)
    for shard in shards:
        caplog.clear()
        assert not load(folder, shard).config.is_tied
        assert any("tie_word_embeddings" in record.getMessage() for record in caplog.records)


def test_a_head_that_the_embedding_is_tied_to_is_read_for_both(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen2", tmp_path)
    path = folder / "model.safetensors"
    before = load(folder)
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}, path)
    for after in (load(folder), load(folder, Shard(stages=2)), load(folder, Shard(stage=1, stages=2))):
        assert after.config.is_tied
    assert load(folder).weight_bytes == before.weight_bytes
    edit = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(edit))
    with pytest.raises(ModelError, match=r"has no tensor model\.embed_tokens\.weight"):
        load(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load(folder)


def test_frequencies_and_masks_in_old_checkpoints_are_ignored(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}, path)
    load(folder)


def test_tensors_without_the_outer_prefix_are_found(tmp_path: Path) -> None:
    folder = tiny_checkpoint("gpt2", tmp_path)
    path = folder / "model.safetensors"
    before = load(folder).weight_bytes
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}, path)
    assert load(folder).weight_bytes == before


@pytest.mark.parametrize("kind", [PanelLinear, OneDnnLinear, MklLinear])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_weight_is_right_for_any_number_of_rows(kind: type[Linear], has_bias: bool) -> None:
    weight, bias = torch.randn(53, 31), torch.randn(53) if has_bias else None
    packed, plain = kind(weight, bias), Linear(weight, bias)
    for rows in (1, 2, 15, 16, 17, 40, 300):
        x = torch.randn(rows, 31)
        torch.testing.assert_close(packed(x), plain(x), atol=1e-5, rtol=1e-5)


def test_a_single_rank_exchanges_nothing(folder: Path) -> None:
    """Its results may wait for the end of a block (Stage): nothing may read them before."""
    model = load_stage(folder, group=TensorLink(1, RankProgress()), packs=False)
    assert isinstance(model.group, SingleRank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_shape_is_timed_once_and_the_choice_is_logged(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    packing = LayoutChooser()
    with caplog.at_level(logging.INFO, logger="orca.worker.weights.layout_choice"):
        kinds = {type(packing.linear(torch.randn(400, 300, dtype=dtype))) for _ in range(3)}
    assert len(kinds) == 1
    said = f"weight 400 x 300 {str(dtype).removeprefix('torch.')}: {kinds.pop().__name__}"
    assert [record.message.split(";")[0] for record in caplog.records] == [said]


def test_a_slow_layout_is_timed_once_and_the_others_take_their_best_time() -> None:
    """One run of the slow one takes longer than a candidate has, one of the quick one a hundredth of that."""
    now = 0.0

    class Timed(Linear):
        def __init__(self, times: list[float]) -> None:
            super().__init__(torch.zeros(1, 1))
            self.times = times

        def __call__(self, x: Tensor) -> Tensor:
            nonlocal now
            now += self.times.pop(0)
            return x

    slow, quick = Timed([0.5, 0.1]), Timed([0.002] * 9 + [0.001] + [0.002] * 4 + [0.0])
    assert best_times_s([slow, quick], torch.zeros(1, 1), clock=lambda: now) == pytest.approx([0.5, 0.001])
    assert (len(slow.times), len(quick.times)) == (1, 1)


@pytest.mark.parametrize(
    ("times_us", "best"),
    [
        ({Linear: 60, PanelLinear: 80, OneDnnLinear: 50}, PanelLinear),  # which the layers around it run together with
        ({Linear: 600, PanelLinear: 800, OneDnnLinear: 700}, Linear),
        ({Linear: 600, PanelLinear: 500, OneDnnLinear: 450}, PanelLinear),
        ({Linear: 600, PanelLinear: 500, OneDnnLinear: 350}, PanelLinear),
        ({Linear: 600, PanelLinear: 500, OneDnnLinear: 250}, OneDnnLinear),
    ],
)
def test_other_layouts_than_panels_cost_what_they_take_out_of_a_block(
    times_us: dict[type[Linear], int], best: type[Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(candidates: list[Linear], _x: Tensor) -> list[float]:
        return [1e-6 * times_us.get(type(candidate), 1000) for candidate in candidates]

    monkeypatch.setattr(layout_choice, "best_times_s", timed)
    assert layout_choice.fastest_layout(torch.randn(64, 32), None, is_together=True) is best


def test_layouts_of_weights_that_run_separately_are_compared_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = {Linear: 60e-6, PanelLinear: 80e-6}
    monkeypatch.setattr(
        layout_choice, "best_times_s", lambda candidates, _x: [times_s.get(type(each), 1.0) for each in candidates]
    )
    assert layout_choice.fastest_layout(torch.randn(64, 32), None) is Linear


def test_a_head_that_was_timed_in_part_is_packed_completely() -> None:
    weight, x = torch.randn(17000, 16), torch.randn(3, 16)
    torch.testing.assert_close(LayoutChooser().linear(weight)(x), x @ weight.t(), atol=1e-5, rtol=1e-5)


def test_small_weights_stay_as_they_are_and_are_not_timed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="orca.worker.weights.layout_choice"):
        assert type(LayoutChooser().linear(torch.randn(20, 10))) is Linear
    assert not caplog.records


def test_a_weight_in_panels_or_of_onednn_replaces_the_plain_one_and_an_mkl_weight_joins_it() -> None:
    weight = torch.randn(64, 32)
    assert OneDnnLinear(weight).bytes == Linear(weight).bytes
    assert PanelLinear(weight).bytes == Linear(weight).bytes + 64 * 4  # sums begin with a bias, be it 0
    assert MklLinear(weight).bytes == 2 * Linear(weight).bytes


def test_a_slot_takes_the_memory_of_the_ranks_own_layers_and_heads(original: Path) -> None:
    whole, half = load(original), load(original, Shard(rank=1, tensor=2))
    assert whole.kv_bytes_per_slot == 3 * 2 * 2 * 10 * 4  # layers, keys and values, KV heads, head_dim, float32
    assert half.kv_bytes_per_slot == whole.kv_bytes_per_slot // 2
