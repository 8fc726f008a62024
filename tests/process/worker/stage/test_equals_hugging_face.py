"""Float32 greedy output equals Hugging Face `generate`, token for token, for every family and layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from orca.bench.parts.tiny_families import FAMILIES, reference_model, tiny_checkpoint
from orca.worker.weights.linear import Linear, MklLinear, OneDnnLinear, PanelLinear
from support.worker.stage_driver import Ask, Chain, Expected, differences, generate, random_asks, serve

NEW_MAX = 14


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Model:
    """A checkpoint and its reference, whose answers are remembered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = reference_model(folder)
        self.vocab_size: int = self.reference.config.vocab_size
        self._known: dict[tuple[int, ...], Expected] = {}

    def expected(self, ask: Ask) -> Expected:
        prompt = tuple(ask.prompt)
        if prompt not in self._known:
            self._known[prompt] = generate(self.reference, prompt, NEW_MAX)
        known = self._known[prompt]
        return Expected(known.tokens[: ask.max_new_tokens], known.margins[: ask.max_new_tokens])

    def check(self, asks: list[Ask], excused: int = 0) -> None:
        assert differences(asks, [self.expected(ask) for ask in asks]) <= excused


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Model] = {}

    def model(family: str, **overrides: Any) -> Model:
        key = family + repr(sorted(overrides.items()))
        if key not in made:
            made[key] = Model(tiny_checkpoint(family, tmp_path_factory.mktemp(family), seed=1, **overrides))
        return made[key]

    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_arriving_at_random_get_what_generate_gives_each_alone(family: str, models: Any) -> None:
    model = models(family)
    asks = random_asks(model.vocab_size, 24, seed=7, new_max=NEW_MAX)
    steps = serve(Chain(model.folder), asks, max_batch_size=5)
    assert any({row.count > 1 for row in step.rows} == {True, False} for step in steps), "no step mixed both phases"
    model.check(asks)


@pytest.mark.covered(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_stages_and_ranks_do_not_change_the_output(family: str, stages: int, tensor: int, models: Any) -> None:
    model = models(family)
    asks = random_asks(model.vocab_size, 8, seed=7, new_max=NEW_MAX)
    chain = Chain(model.folder, stages=stages, tensor=tensor)
    serve(chain, asks)
    chain.close()
    model.check(asks)


@pytest.mark.covered(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_prompts_in_chunks_give_the_same_output(family: str, chunk: int, models: Any) -> None:
    model = models(family)
    asks = random_asks(model.vocab_size, 8, seed=7, new_max=NEW_MAX)
    serve(Chain(model.folder, stages=2), asks, chunk=chunk)
    model.check(asks)


@pytest.mark.covered(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("stages", "tensor"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_steps_that_draw_nothing_give_the_same_output(family: str, stages: int, tensor: int, models: Any) -> None:
    """All chunks of a single prompt but the last one draw nothing."""
    model = models(family)
    chain = Chain(model.folder, stages=stages, tensor=tensor)
    for chunk in (1, 4):
        asks = [Ask([*range(2, 39)], 6)]
        serve(chain, asks, chunk=chunk)
        model.check(asks)
    chain.close()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tokens_fed_on_the_device_give_the_same_output(family: str, models: Any) -> None:
    model = models(family)
    asks = random_asks(model.vocab_size, 10, seed=8, new_max=NEW_MAX)
    serve(Chain(model.folder, stages=2, feeds_tokens=True), asks)
    model.check(asks)


@pytest.mark.covered(1)
@pytest.mark.parametrize("layout", [PanelLinear, OneDnnLinear, MklLinear])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
def test_packed_weights_give_the_same_output(family: str, layout: type[Linear], models: Any) -> None:
    model = models(family)
    asks = random_asks(model.vocab_size, 24, seed=9, new_max=NEW_MAX)
    serve(Chain(model.folder, packs=layout), asks, max_batch_size=20)
    model.check(asks)


@pytest.mark.covered(1)
@pytest.mark.parametrize("packs", [PanelLinear, OneDnnLinear, True, False])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_files_in_half_precision_give_the_output_of_float32_in_any_layout(
    family: str, stored: torch.dtype, packs: bool | type[Linear], models: Any
) -> None:
    """Panels keep them so; the others are widened."""
    model = models(family, stored=stored)
    chain = Chain(model.folder, packs=packs)
    [[stage]] = chain.stages
    kept_in = stored if packs is PanelLinear else torch.float32
    assert {each.weight.dtype for each in stage._model.linears} == {kept_in}
    asks = random_asks(model.vocab_size, 24, seed=14, new_max=NEW_MAX)
    serve(chain, asks, max_batch_size=20)
    model.check(asks)


@pytest.mark.covered(1)
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"head_dim": 16}),  # a whole number of vectors, which are kept in the same go
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"activation_function": "quick_gelu"}),
        ("opt", {"do_layer_norm_before": False, "layer_norm_elementwise_affine": False}),
    ],
)
def test_layers_whose_kernels_run_together_give_the_same_output(
    family: str, options: dict[str, Any], stages: int, is_recorded: bool, models: Any
) -> None:
    model = models(family, **options)
    chain = Chain(model.folder, packs=PanelLinear, stages=stages)
    for [stage] in chain.stages:
        assert stage._laid_out._only_kernels
        if not is_recorded:
            stage._recorded = None
    asks = random_asks(model.vocab_size, 24, seed=13, new_max=NEW_MAX)
    serve(chain, asks, max_batch_size=20, chunk=7)
    model.check(asks)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tensor": 2}),  # sums over ranks
        ("llama", {"packs": OneDnnLinear}),
        ("gpt2", {"packs": OneDnnLinear}),
    ],
)
def test_layers_with_other_operations_than_kernels_do_not_run_together(
    family: str, options: dict[str, Any], models: Any
) -> None:
    chain = Chain(models(family).folder, **{"packs": PanelLinear} | options)
    assert not any(stage._laid_out._only_kernels for ranks in chain.stages for stage in ranks)


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_a_request_restarted_from_its_log_continues_as_before(family: str, models: Any) -> None:
    model = models(family)
    asks = random_asks(model.vocab_size, 6, seed=10, new_max=NEW_MAX)
    for ask in asks:
        ask.log = model.expected(ask).tokens[: ask.max_new_tokens // 2]
    serve(Chain(model.folder), asks)
    model.check(asks)
    assert all(ask.sampled[0].index == len(ask.log) for ask in asks if ask.sampled)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-scaled-by-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}),
    "gpt2-default-inner": ("gpt2", {"n_inner": None, "scale_attn_weights": False}),
    "opt-350m-shape": ("opt", {"word_embed_proj_dim": 14, "do_layer_norm_before": False}),
    "opt-no-bias": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-derived-head-dim": ("llama", {"head_dim": None, "num_key_value_heads": 6}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2-full": ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": False}),
    "qwen2-layer-types": (
        "qwen2",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_key_value_heads": 1},
    ),
    "qwen3-tied-biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "rope-dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
            "max_position_embeddings": 20,
        },
    ),
    "rope-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 24,
            }
        },
    ),
    "rope-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 200.0,
                "factor": 4.0,
                "original_max_position_embeddings": 24,
            }
        },
    ),
    "rope-longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 200.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4],
                "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0],
                "original_max_position_embeddings": 20,
            }
        },
    ),
}


@pytest.mark.covered(1)
@pytest.mark.parametrize(("stages", "packs"), [(2, False), (1, PanelLinear)], ids=["plain", "panels"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_option_of_a_config_is_computed_as_hugging_face_does(
    name: str, stages: int, packs: bool | type[Linear], models: Any
) -> None:
    family, overrides = VARIANTS[name]
    model = models(family, **overrides)
    asks = random_asks(model.vocab_size, 7, seed=11, prompt_max=40, new_max=NEW_MAX)
    serve(Chain(model.folder, stages=stages, packs=packs), asks, chunk=9)
    if name in ("rope-dynamic", "rope-longrope"):
        # There the reference keeps the frequencies of the longest sequence it has seen; each prompt gets a fresh one.
        expected = [generate(reference_model(model.folder), ask.prompt, ask.max_new_tokens) for ask in asks]
        assert any(len(ask.prompt) + ask.max_new_tokens > 20 > len(ask.prompt) for ask in asks)
        assert any(len(ask.prompt) > 20 for ask in asks)
        assert differences(asks, expected) == 0
    else:
        model.check(asks)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_greedy_output_of_a_tiny_model_depends_on_all_of_its_prompt(family: str, models: Any) -> None:
    model = models(family)
    prompt = [5, 80, 17, 44, 102, 9, 63, 31, 120, 77, 52]
    base = generate(model.reference, prompt, NEW_MAX).tokens
    unheard = 0
    for place, token in enumerate(prompt):
        other = [*prompt[:place], (token + 5) % model.vocab_size, *prompt[place + 1 :]]
        unheard += generate(model.reference, other, NEW_MAX).tokens == base
    assert unheard <= 1, "comparing outputs would prove little"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_runs_in_half_precision_and_stays_near_the_full_one(dtype: str, models: Any) -> None:
    model = models("llama")
    asks = random_asks(model.vocab_size, 8, seed=12, new_max=4)
    serve(Chain(model.folder, dtype=dtype, tensor=2), asks)
    firsts = [ask.output[0] == model.expected(ask).tokens[0] for ask in asks]
    assert sum(firsts) >= len(firsts) // 2
