"""The decode phases of round-robin allocation: who takes part in which iteration (ExeGPT, section 6).

Two countings exist. In Orca the encode iteration draws the first token, so an answer of s tokens takes part in s - 1
decode iterations. The paper counts s.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from orca.planner.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class DecodePhases:
    """The batch in each iteration of a decode phase, for one request that enters in each cycle."""

    decode_steps: int  # N_D
    mean_phases: float  # E[k]: phases that an answer takes part in; Little's law makes it B_D / B_E
    requests: tuple[float, ...]  # in iteration 1, 2 ...; up to the last one in which there can be any
    generated: tuple[float, ...]  # tokens of its answer that attention reads for each of them, on average
    prompts: tuple[float, ...]  # prompt tokens of each of them, on average

    def phases(self, output: int) -> int:
        """Return the decode phases of an answer of so many tokens, 0 if its encode iteration draws them all."""
        return ceil((output - 1) / self.decode_steps)

    def last_iteration(self, output: int) -> int:
        """Return the iteration of its last phase that draws an answer's last token, from 1; 0 without a phase."""
        return (output - 2) % self.decode_steps + 1 if output > 1 else 0


@lru_cache(maxsize=1024)
def decode_phases(workload: Workload, decode_steps: int) -> DecodePhases:
    """Return the phases of a workload. Every iteration's batch follows from the one before, so this takes O(lengths).

    Requests in flight are not like those that arrive: a long answer takes part in more iterations. All sums here run
    over the requests in the batch.
    """
    outputs = workload.outputs
    last = min(decode_steps, max(outputs.high - 1, 0))
    ending = [0.0] * (last + 1)  # by the iteration in which they end: share, tokens generated, prompts
    ending_generated = [0.0] * (last + 1)
    ending_prompts = [0.0] * (last + 1)
    rows = generated = prompts = 0.0
    for length, share, prompt in zip(outputs.lengths, outputs.shares, workload.mean_prompts, strict=True):
        decoded = length - 1
        if not decoded:
            continue
        phases = -(-decoded // decode_steps)
        rows += share * phases
        # Iteration 1 of phase number i is its decode iteration (i - 1) * N_D + 1, which reads so many tokens.
        generated += share * (phases + decode_steps * phases * (phases - 1) / 2)
        prompts += share * phases * prompt
        end = (decoded - 1) % decode_steps + 1
        ending[end] += share
        ending_generated[end] += share * decoded
        ending_prompts[end] += share * prompt
    mean_phases = rows
    table: list[tuple[float, float, float]] = []
    for iteration in range(1, last + 1):
        if rows <= 1e-12:
            break
        table.append((rows, generated / rows, prompts / rows))
        rows -= ending[iteration]
        generated += rows - ending_generated[iteration]
        prompts -= ending_prompts[iteration]
    columns = tuple(zip(*table, strict=True)) or ((), (), ())
    return DecodePhases(decode_steps, mean_phases, *columns)


@lru_cache(maxsize=1024)
def paper_phases(workload: Workload, decode_steps: int) -> DecodePhases:
    """Return the phases by the paper's formula B_D = B_E / sum over U of P_D(U), which counts s decode iterations.

    It averages 1 / k over arriving requests and not over those in the batch, and so finds a smaller batch.
    """
    outputs = workload.outputs
    ending = [0.0] * (min(decode_steps, outputs.high) + 1)  # P_D(U)
    for length, share in zip(outputs.lengths, outputs.shares, strict=True):
        ending[(length - 1) % decode_steps + 1] += share / ceil(length / decode_steps)
    batch = 1 / sum(ending)
    left, requests = 1.0, []
    for iteration in range(1, len(ending)):
        requests.append(batch * left)
        left = max(left - ending[iteration], 0.0)
    ours = decode_phases(workload, decode_steps)
    generated = _padded(ours.generated, len(requests), 1.0)
    prompts = _padded(ours.prompts, len(requests), workload.prompts.mean)
    return DecodePhases(decode_steps, batch, tuple(requests), generated, prompts)


def _padded(values: tuple[float, ...], count: int, default: float) -> tuple[float, ...]:
    """Return the first `count` values; the last one is repeated."""
    last = values[-1] if values else default
    return (values + (last,) * count)[:count]
