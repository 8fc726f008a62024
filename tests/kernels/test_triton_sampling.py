"""Sampling on a GPU against its reference and the stage's sampler; splits are short, so that small rows have many."""

from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from scipy import stats
from torch import Tensor

from orca.core.domain.request import SamplingParams
from orca.kernels.contract.sampling_lines import COUNT_MAX, IN_PROMPT, SamplingLines
from orca.kernels.contract.sampling_reference import sample_reference
from orca.kernels.gpu import sampling
from orca.worker.stage.host_sampler import Draw, SamplingState
from orca.worker.stage.host_sampler import sample as sample_plain
from orca.worker.stage.random_numbers import uniforms
from support.kernels.gpu import DEVICE
from support.kernels.sampling_rows import CASES, EOS, drawn, every_case, lines_of, random_logits

CPU = torch.device("cpu")
MARGIN = 1e-5
"""Tolerance of a cumulated probability: sums of float32 are right to 1e-6, and the gap between two tokens may be twice
that.
"""


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SPLIT", 64)


def require_alike(logits: Tensor, lines: Sequence[int], index: int, state: SamplingLines, other: SamplingLines) -> int:
    """Draws in both ways, and compares all that comes of it. Returns: how many rows rounding has decided."""
    tokens, logprobs = drawn(logits, lines, index, state)
    indices = torch.full((len(lines),), index)
    expected = sample_reference(logits, torch.tensor(lines), indices, other)
    excused = 0
    for row, (line, one) in enumerate(zip(lines, expected, strict=True)):
        if one is None:
            assert (int(tokens[row]), bool(logprobs[row].isnan())) == (-7, True)
            continue
        token = int(tokens[row])
        assert one.allows(token, MARGIN), f"row {row}: {token}, expected {one.token}"
        assert int(state.last_tokens[line]) == token
        excused += token != one.token
        score = logits[row].double().log_softmax(0)[token].float()
        torch.testing.assert_close(logprobs[row], score, atol=2e-6, rtol=2e-6)
    if not excused:
        assert torch.equal(state.counts.cpu(), other.counts)
        assert torch.equal(state.last_tokens.cpu(), other.last_tokens)
    return excused


@pytest.mark.sampled(1, others="prove")
@pytest.mark.parametrize("vocab", [12, 64, 65, 500])
def test_rows_of_all_kinds_beside_padding_equal_the_reference(vocab: int) -> None:
    cases = every_case()
    state, other = (lines_of(cases, vocab, device, output=(4, 4, 9)) for device in (DEVICE, CPU))
    lines = [-1, *range(len(cases)), -1]
    assert require_alike(random_logits(len(lines), vocab), lines, 2, state, other) == 0


def test_a_vocabulary_of_several_split_groups_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cases = [SamplingParams(seed=3, **CASES[name]) for name in ("plain", "everything", "top-k-most", "top-p", "greedy")]
    state, other = (lines_of(cases, 11_111, device) for device in (DEVICE, CPU))
    assert require_alike(random_logits(5, 11_111), range(5), 0, state, other) == 0


@pytest.mark.slow
def test_tokens_are_counted_on_the_device_step_after_step() -> None:
    penalties = ("repetition", "presence", "frequency", "rewarded", "everything", "plain")
    cases = [SamplingParams(seed=seed, **CASES[name]) for seed, name in enumerate(penalties)]
    state, other = (lines_of(cases, 24, device) for device in (DEVICE, CPU))
    for index in range(12):
        lines = list(range(len(cases)))[index % 2 :]
        assert require_alike(random_logits(len(lines), 24, seed=index), lines, index, state, other) == 0


@pytest.mark.sampled(1, others="prove")
@pytest.mark.parametrize("case", ["plain", "hot", "top-k", "top-p", "all-cuts", "everything"])
def test_the_same_seed_samples_the_token_of_the_stage(case: str) -> None:
    rows, vocab, output = 30, 150, (4, 4, 9)
    logits = random_logits(rows, vocab, seed=len(case))
    cases = [SamplingParams(**({"seed": (1 << 62) + seed} | CASES[case])) for seed in range(rows)]
    plain = sample_plain(
        logits, [Draw(SamplingState.start(each, (3, 3, 5, *output), 3, EOS), len(output)) for each in cases]
    ).tokens
    tokens, _ = drawn(logits, range(rows), len(output), lines_of(cases, vocab, DEVICE, output))
    reference = lines_of(cases, vocab, CPU, output)
    exact = sample_reference(logits, torch.arange(rows), torch.full((rows,), len(output)), reference)
    assert [one and one.token for one in exact] == plain
    others = [one for one, token in zip(exact, tokens.tolist(), strict=True) if one and one.token != token]
    assert len(others) <= 1
    assert all(one and one.allows(token, MARGIN) for one, token in zip(exact, tokens.tolist(), strict=True))


def kept(logits: Tensor, cases: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """[rows, vocab], what the floors keep of logits that nothing changes, and what the reference keeps."""
    rows, vocab = logits.shape
    lines, indices = torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    given = (each.to(DEVICE) for each in (logits, lines, indices))
    _, floors = sampling.weigh_and_cut(*given, lines_of(cases, vocab, DEVICE).tables)
    exact = sample_reference(logits, lines, indices, lines_of(cases, vocab, CPU))
    expected = torch.stack([one.kept for one in exact if one])
    assert min(one.edge for one in exact if one) > 1e-6  # no share is so near to top_p that rounding decides
    return logits >= floors.cpu()[:, None], expected


@pytest.mark.sampled(2, others="prove")
@pytest.mark.parametrize("scale", [0.01, 3.0, 40.0])
@pytest.mark.parametrize("offset", [0.0, -90.0])
def test_floors_keep_the_tokens_that_the_reference_keeps(offset: float, scale: float) -> None:
    """Cuts near both ends and between, of logits on both sides of zero and far from it."""
    cuts: list[dict[str, float]] = [{"top_k": each} for each in (1, 2, 3, 50, 199)]
    cuts += [{"top_p": each} for each in (1e-9, 0.2, 0.77, 0.97, 0.9997)]
    cuts += [{"min_p": each} for each in (1e-5, 0.3, 1.0)]
    cuts += [{"top_k": 30, "top_p": 0.81, "min_p": 0.01}, {"top_k": 3, "top_p": 0.99}]
    cases = [SamplingParams(temperature=0.9, **each) for each in cuts]  # type: ignore[arg-type]
    logits = torch.randn(len(cases), 200, generator=torch.Generator().manual_seed(9)) * scale + offset
    found, expected = kept(logits, cases)
    assert torch.equal(found, expected), [cuts[row] for row in (found != expected).any(dim=1).nonzero()]


def test_floors_of_difficult_logits_equal_the_reference() -> None:
    rest = torch.full((3, 200), -7.4)
    rest[0, 5] = 0.0  # nine tenths of the weight take all the others, each of them as light as can be
    rest[1, (5, 6)] = torch.tensor([0.0, -1e-6])  # the two largest lie side by side
    rest[2] = torch.linspace(-1e30, 1e30, 200)  # no value is near another
    cases = [SamplingParams(**each) for each in ({"top_p": 0.9}, {"top_k": 1}, {"top_k": 150})]  # type: ignore[arg-type]
    found, expected = kept(rest, cases)
    assert found.sum(dim=1).tolist() == [200, 1, 150]
    assert torch.equal(found[:2], expected[:2])


def test_masked_tokens_are_allowed_after_min_tokens() -> None:
    state = lines_of([SamplingParams(**CASES["min-tokens-greedy"])], 100, DEVICE)
    logits = random_logits(1, 100)
    assert [int(drawn(logits, [0], index, state)[0]) == 1 for index in range(5)] == [False] * 3 + [True] * 2


@pytest.mark.slow
def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    cases = every_case()
    logits = random_logits(len(cases), 300)
    together = drawn(logits, range(len(cases)), 1, lines_of(cases, 300, DEVICE, (4,)))
    order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(3))
    shuffled = drawn(logits[order], order.tolist(), 1, lines_of(cases, 300, DEVICE, (4,)))
    assert all(torch.equal(one[order], other) for one, other in zip(together, shuffled, strict=True))
    state = lines_of(cases, 300, DEVICE, (4,))
    alone = [drawn(logits[row : row + 1], [row], 1, state) for row in range(len(cases))]
    assert torch.equal(torch.cat([tokens for tokens, _ in alone]), together[0])
    assert torch.equal(torch.cat([logprobs for _, logprobs in alone]), together[1])


@pytest.mark.sampled(1, others="prove")
@pytest.mark.parametrize("case", [{"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.6}, {"top_k": 70, "top_p": 0.3}], ids=str)
def test_equal_logits_are_kept_or_dropped_together(case: dict[str, float]) -> None:
    """Steps of a half, as of a coarse dtype: a floor has many tokens, on both sides of zero and over several splits."""
    logits = ((torch.arange(200) * 37 % 200) // 25 / 2.0 - 3.5).expand(40, -1).contiguous()
    cases = [SamplingParams(seed=seed, **case) for seed in range(40)]  # type: ignore[arg-type]
    state, other = (lines_of(cases, 200, device) for device in (DEVICE, CPU))
    assert require_alike(logits, range(40), 0, state, other) == 0
    assert len(set(state.last_tokens.tolist())) > 15  # of the 25 that the uppermost step has


@pytest.mark.sampled(2, others="prove")
@pytest.mark.parametrize("case", ["greedy", "plain", "top-k", "top-p", "min-p", "all-cuts", "frequency"])
def test_tokens_of_no_probability_are_never_drawn(case: str) -> None:
    logits = torch.full((20, 200), float("-inf"))
    logits[:, (70, 199)] = torch.tensor([1.0, 1.0])
    cases = [SamplingParams(**({"seed": seed} | CASES[case])) for seed in range(20)]
    tokens, logprobs = drawn(logits, range(20), 0, lines_of(cases, 200, DEVICE))
    assert set(tokens.tolist()) == ({70} if cases[0].temperature == 0 else {70, 199})
    torch.testing.assert_close(logprobs, torch.full((20,), 0.5).log(), atol=1e-6, rtol=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_a_row_without_an_allowed_token_stays_in_the_vocabulary() -> None:
    """And so does one that is not a number: what it means is up to those who see it, but it names a token."""
    cases = every_case(min_tokens=0)
    for value in ("-inf", "nan"):
        logits = torch.full((len(cases), 100), float(value))
        tokens, _ = drawn(logits, range(len(cases)), 0, lines_of(cases, 100, DEVICE))
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 100


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-12])
def test_the_lowest_temperatures_take_the_largest_logit(temperature: float) -> None:
    logits = random_logits(8, 300) * 100
    cases = [SamplingParams(temperature=temperature, seed=seed, top_p=0.9) for seed in range(8)]
    tokens, _ = drawn(logits, range(8), 0, lines_of(cases, 300, DEVICE))
    assert torch.equal(tokens, logits.argmax(dim=-1))


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.zeros(3, 200)
    logits[0, (150, 70, 199)] = 2.0
    logits[1, (64, 65)] = 2.0
    cases = [SamplingParams(temperature=0.0)] * 3
    assert drawn(logits, range(3), 0, lines_of(cases, 200, DEVICE))[0].tolist() == [70, 64, 0]


@pytest.mark.sampled(1, others="prove")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_other_dtypes_mean_the_same_numbers(dtype: torch.dtype) -> None:
    cases = every_case()
    logits = random_logits(len(cases), 100).to(dtype)
    narrow, wide = (
        drawn(each, range(len(cases)), 0, lines_of(cases, 100, DEVICE)) for each in (logits, logits.float())
    )
    assert all(torch.equal(one, other) for one, other in zip(narrow, wide, strict=True))


def test_three_hundred_biases_of_one_request_equal_the_reference() -> None:
    bias = tuple((token, -30.0) for token in range(50, 350) if token != 222)
    cases = [SamplingParams(logit_bias=bias, seed=seed) for seed in range(4)]
    state, other = (lines_of(cases, 400, device) for device in (DEVICE, CPU))
    assert require_alike(random_logits(4, 400), range(4), 0, state, other) == 0


@pytest.mark.sampled(1, others="prove")
@pytest.mark.parametrize(("case", "rows"), [("plain", 300), ("top-k", 80), ("top-p", 120)])
def test_drawn_tokens_follow_the_distribution(case: str, rows: int) -> None:
    logits = torch.linspace(-1.5, 1.5, 12).expand(rows, -1).contiguous()
    cases = [SamplingParams(**({"seed": seed} | CASES[case])) for seed in range(rows)]
    tokens, _ = drawn(logits, range(rows), 3, lines_of(cases, 12, DEVICE))
    first = torch.zeros(1, dtype=torch.int64)
    [one] = sample_reference(logits[:1], first, first, lines_of(cases[:1], 12, CPU))
    assert one is not None
    expected = one.cumulated.diff(prepend=torch.zeros(1)) * rows
    found = torch.bincount(tokens, minlength=12)
    kept = expected > 0
    assert not found[~kept].any()
    result = stats.chisquare(found[kept].numpy(), expected[kept].numpy())
    assert result.pvalue > 1e-3  # the seeds are fixed: it holds always or never


@triton.jit  # type: ignore[untyped-decorator]
def write_uniforms(seeds, indices, numbers):  # type: ignore[no-untyped-def]
    at = tl.program_id(0)
    tl.store(numbers + at, sampling.uniform(tl.load(seeds + at), tl.load(indices + at)))


def test_random_numbers_are_those_of_the_stage_bit_for_bit() -> None:
    most = (1 << 63) - 1
    seeds = [0, 1, 0, 7, (1 << 32) - 1, 1 << 32, 0x299F31D0A4093822, most, most]
    indices = [0, 0, 1, 5, (1 << 32) + 3, 1 << 31, 0x85A308D3243F6A8, most, 12]
    numbers = torch.full((len(seeds),), float("nan"), dtype=torch.float64, device=DEVICE)
    given = (torch.tensor(each, device=DEVICE) for each in (seeds, indices))
    write_uniforms[(len(seeds),)](*given, numbers)
    assert numbers.tolist() == uniforms(seeds, indices).tolist()


def test_a_count_saturates_and_a_prompt_token_stays_one() -> None:
    case = SamplingParams(temperature=0.0, frequency_penalty=0.001)
    state = lines_of([case], 10, DEVICE, output=(5,) * COUNT_MAX)
    logits = torch.zeros(1, 10)
    logits[0, 5] = 100.0
    assert drawn(logits, [0], COUNT_MAX, state)[0].tolist() == [5]
    counts, *others = state.counts.tolist()
    assert counts == [0, 0, 0, IN_PROMPT, 0, IN_PROMPT + COUNT_MAX, 0, 0, 0, 0]
    assert not any(map(any, others))
