"""Random weights by name, the plain formulas that judge tokens, and how they judge."""

from dataclasses import replace

import pytest
import torch
import transformers

from orca.bench.gpu.check import verdict
from orca.bench.gpu.hugging_face import hugging_face_model
from orca.bench.gpu.plain_llama import PlainLlama
from orca.bench.gpu.random_weights import RandomTensors
from orca.bench.gpu.seq2seq.plain_t5 import START, PlainT5
from orca.bench.gpu.seq2seq.translation import SMALL_T5
from orca.bench.gpu.shapes import SMALL, llama, random_tokens

CPU = torch.device("cpu")
DEEP = llama(layers=32, hidden=128, intermediate=448, heads=4, kv_heads=1, head_dim=32, vocab=1000)
"""A shape as deep as that of 8 billion parameters, and much narrower."""


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> RandomTensors:
    return RandomTensors(dtype=dtype, device=CPU, seed=seed)


def greedy(prompt: list[int], count: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """The small model's tokens by the plain formulas in float32, its weights rounded to `dtype`."""
    plain, answer = PlainLlama(SMALL, tensors(dtype), torch.float32), list[int]()
    for _ in range(count):
        answer.append(int(plain.logits([prompt + answer], [1])[0].argmax()))
    return answer


def test_a_tensor_and_any_slice_of_it_follow_from_its_name_and_the_seed() -> None:
    whole = tensors().read("a.weight", (20, 30))
    assert torch.equal(tensors().view("a.weight", (20, 30), (3, 7), (10, 30)), whole[3:7, 10:])
    assert torch.equal(tensors().read("a.weight", (20, 30), None, (1, 2)), whole[:, 1:2])
    assert not torch.equal(tensors().read("b.weight", (20, 30)), whole)
    assert not torch.equal(tensors(seed=1).read("a.weight", (20, 30)), whole)


def test_the_formulas_are_those_of_hugging_face_and_sequences_do_not_touch() -> None:
    sequences = [random_tokens(SMALL, count, seed=count) for count in (1, 17, 40)]
    ours = PlainLlama(SMALL, tensors(), torch.float32).logits(sequences, [1, 17, 5])
    model = hugging_face_model(SMALL, tensors())
    for sequence, logits in zip(sequences, ours, strict=True):
        with torch.inference_mode():
            theirs = model(input_ids=torch.tensor([sequence])).logits[0, -len(logits) :]
        # Float32 sums of up to 80 numbers, through three layers.
        torch.testing.assert_close(logits, theirs, rtol=0, atol=2e-5)


def test_the_formulas_of_t5_are_those_of_hugging_face_and_sequences_do_not_touch() -> None:
    config = transformers.T5Config(
        vocab_size=SMALL_T5.vocab_size,
        d_model=SMALL_T5.hidden_size,
        d_kv=SMALL_T5.head_dim,
        d_ff=SMALL_T5.decoder.intermediate_size,
        num_layers=SMALL_T5.encoder.layers,
        num_heads=SMALL_T5.num_heads,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors().read(name, tuple(parameter.shape)))
    draw = torch.Generator().manual_seed(1)
    sources, answers = (
        [torch.randint(SMALL_T5.vocab_size, (count,), generator=draw).tolist() for count in counts]
        for counts in ((1, 17, 150), (140, 5, 1))
    )
    ours = PlainT5(SMALL_T5, tensors(), torch.float32).answer_logits(sources, answers)
    for source, answer, logits in zip(sources, answers, ours, strict=True):
        target = torch.tensor([[START, *answer[:-1]]])
        with torch.inference_mode():
            theirs = model(input_ids=torch.tensor([source]), decoder_input_ids=target).logits[0]
        # Float32 sums of up to 150 numbers, through four layers.
        torch.testing.assert_close(logits, theirs, rtol=0, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_model_stays_finite_and_depends_on_every_prompt_token(dtype: torch.dtype) -> None:
    prompt, plain = random_tokens(DEEP, 60, seed=1), PlainLlama(DEEP, tensors(dtype), dtype)
    changed = [[*prompt[:at], (prompt[at] + 1) % 1000, *prompt[at + 1 :]] for at in (0, 20, 58)]
    first, *others = plain.logits([prompt, *changed], [1] * 4)
    assert torch.isfinite(first).all()
    assert 1.0 < first.std() < 2.0
    # By more than rounding does, which is a tenth of a deviation at most in bfloat16.
    assert all((first - other).std() > 0.3 for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_tokens_pass_and_each_wrong_one_is_reported(dtype: torch.dtype) -> None:
    prompts = [random_tokens(SMALL, count, seed=count) for count in (5, 9)]
    answers = [greedy(prompt, 8, dtype) for prompt in prompts]
    right = verdict(SMALL, tensors(dtype), prompts, answers, [8, 8])
    assert right.is_right
    assert str(right) == "right: 16 tokens"
    answers[0][3] = (answers[0][3] + 1) % SMALL.vocab_size
    del answers[1][-1]
    wrong = verdict(SMALL, tensors(dtype), prompts, answers, [8, 8])
    # What follows a wrong token is judged by itself.
    assert wrong.judgement.wrong >= 1
    assert wrong.judgement.wrong_counts == 1
    assert not wrong.is_right
    assert str(wrong).startswith("WRONG: ")


def test_a_margin_that_lets_everything_pass_proves_nothing() -> None:
    prompt = random_tokens(SMALL, 5, seed=5)
    right = verdict(SMALL, tensors(), [prompt], [greedy(prompt, 3)], [3])
    vague = replace(right, passing=0.06)
    assert not vague.is_right
    assert str(vague) == "WRONG: nothing is proved, 6% of all tokens pass"


def test_answers_without_tokens_are_not_right() -> None:
    assert not verdict(SMALL, tensors(), [[1, 2]], [[]], [3]).is_right
