"""Rows of logits that are sampled in every way, and the lines that say so, for tests of sampling."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orca.core.domain.request import SamplingParams
from orca.kernels.contract.sampling_lines import SamplingLines
from orca.kernels.gpu.sampling import sample
from orca.worker.stage.sampling import line_settings
from support.kernels.gpu import DEVICE

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "coldest": {"temperature": 1e-12},
    "hot": {"temperature": 1.9},
    "hottest": {"temperature": 1e35},
    "top-k-1": {"top_k": 1},
    "top-k": {"top_k": 5},
    "top-k-most": {"top_k": 30},
    "top-k-over-vocab": {"top_k": 100_000},
    "top-p": {"top_p": 0.6},
    "top-p-tiny": {"top_p": 1e-6},
    "top-p-nearly-all": {"top_p": 0.9999},
    "min-p": {"min_p": 0.2},
    "min-p-1": {"min_p": 1.0},
    "two-cuts": {"top_k": 9, "top_p": 0.7},
    "all-cuts": {"top_k": 9, "top_p": 0.9, "min_p": 0.1, "temperature": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "repetition-below-1": {"repetition_penalty": 0.6, "temperature": 0.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9, "temperature": 0.0},
    "rewarded": {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    "bias": {"logit_bias": ((2, 4.0), (7, -100.0), (9, 3.5))},
    "min-tokens": {"min_tokens": 3, "stop_token_ids": (2, 4), "logit_bias": ((1, 50.0), (2, 40.0), (4, 40.0))},
    "min-tokens-greedy": {"temperature": 0.0, "min_tokens": 3, "logit_bias": ((1, 50.0),)},
    "everything": {
        "temperature": 1.3,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": ((11, 1.0),),
        "min_tokens": 2,
    },
}
EOS = (1,)


def every_case(**more: Any) -> list[SamplingParams]:
    """Return parameters that reach every case of sampling."""
    return [SamplingParams(**({"seed": seed} | case | more)) for seed, case in enumerate(CASES.values())]


def lines_of(
    all_params: Sequence[SamplingParams], vocab: int, device: torch.device, output: Sequence[int] = ()
) -> SamplingLines:
    """Line n has the n-th parameters; prompts are 3, 3, 5."""
    state = SamplingLines(len(all_params), vocab, device)
    for line, params in enumerate(all_params):
        state.put(line, line_settings(params, EOS), (3, 3, 5), output)
    return state


def drawn(logits: Tensor, lines: Sequence[int], index: int, state: SamplingLines) -> tuple[Tensor, Tensor]:
    """Tokens and log probabilities; of rows that are left out -7 and NaN."""
    rows = len(lines)
    tokens = torch.full((rows,), -7, device=DEVICE)
    logprobs = torch.full((rows,), float("nan"), device=DEVICE)
    indices = torch.full((rows,), index, device=DEVICE)
    lines_there = torch.tensor(lines, dtype=torch.int32, device=DEVICE)
    sample(logits.to(DEVICE), lines_there, indices, state, tokens, logprobs)
    return tokens.cpu(), logprobs.cpu()


def random_logits(rows: int, vocab: int, seed: int = 1) -> Tensor:
    """Return seeded random logits."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2
