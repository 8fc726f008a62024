"""The members of a batch under `iteration`: those that decode, and those whose prompts wait for tokens of a step.

Prompts are served first come, first served, with the tokens that decoding rows leave. The members are the customers of
a closed network: after its prompt a member decodes for s - 1 steps, then a new one takes its place. Approximate mean
value analysis (Schweitzer) gives the steps that a prompt takes, with the residual service of the prompt that runs.
"""

from dataclasses import dataclass
from math import ceil, sqrt
from statistics import fmean

from orca.planner.simulate.estimate import Scenario
from orca.planner.simulate.expected_steps import STRATA, mean_whole


@dataclass(frozen=True, slots=True)
class BatchMembers:
    """Expected numbers of one batch in the steady state."""

    members: float  # b
    entering: float  # X, requests that enter with a step on average
    decoding: float  # d, rows that decode
    prompt_steps: float  # W, steps from a request's entry to its first token
    chunks: float  # those of them in which it has a row
    chunks_high: float  # the same of a prompt of the percentile length
    room: float | None  # C, prompt tokens that a step may have; None: any number
    generated: float  # tokens of its answer that attention reads for each decoding row
    read_prompt: float  # prompt tokens of each decoding row


def batch_members(scenario: Scenario, members: float, batch_tokens: int | None) -> BatchMembers:
    """Return the members of a batch. Args: batch_tokens: `max_batch_tokens`; None: prompts run whole."""
    workload = scenario.workload
    decodes = workload.outputs.mean - 1
    generated, read_prompt = _read_tokens(scenario)
    entering = members / (decodes + 1)
    if batch_tokens is None:
        return BatchMembers(members, entering, entering * decodes, 1.0, 1.0, 1.0, None, generated, read_prompt)
    prompt = workload.prompts.mean
    most = min(entering, batch_tokens / (prompt + decodes))
    low, high = 0.0, most
    if most * (decodes + _prompt_steps(scenario, members, most, batch_tokens)) > members:
        for _ in range(24):
            middle = (low + high) / 2
            if middle * (decodes + _prompt_steps(scenario, members, middle, batch_tokens)) > members:
                high = middle
            else:
                low = middle
    entering = high
    room = max(batch_tokens - entering * decodes, 1.0)
    # If prompts are the bottleneck, all members that do not decode wait for them.
    prompt_steps = max(members / entering - decodes, 1.0)
    load = min(entering * prompt / room, 1.0)
    lengths = workload.prompts.strata(STRATA)
    is_whole = scenario.is_encoder_decoder

    def chunks_of(length: float) -> float:
        """Return the steps of a prompt: it begins with a step of its own, or in the rest of one."""
        return 1.0 if is_whole else (1 - load) * ceil(length / room) + load * (length / room + 1)

    chunks = max(min(fmean(map(chunks_of, lengths)), prompt_steps), 1.0)
    high = max(chunks_of(workload.prompts.percentile(scenario.percent)), chunks)
    decoding = entering * decodes
    return BatchMembers(members, entering, decoding, prompt_steps, chunks, high, room, generated, read_prompt)


def _prompt_steps(scenario: Scenario, members: float, entering: float, batch_tokens: int) -> float:
    """Return the steps that a prompt takes, its wait included, if so many requests enter with a step."""
    workload = scenario.workload
    room = max(batch_tokens - entering * (workload.outputs.mean - 1), 1.0)
    prompts = workload.prompts
    service = prompts.mean / room
    residual = (prompts.mean**2 + prompts.deviation**2) / (2 * prompts.mean) / room
    load = min(entering * service, 1.0)
    # Steps of all batches serve the prompts that wait: several servers (Sakasegawa's approximation), and a customer
    # never waits for itself.
    stages = scenario.stages
    others = max(1 - 1 / (members * stages), 0.0)
    waits = others * load ** (sqrt(2 * (stages + 1)) - 1) * residual / stages / max(1 - others * load, 1e-9)
    return max(mean_whole(service + waits), service)


def _read_tokens(scenario: Scenario) -> tuple[float, float]:
    """Return the tokens that attention reads for a decoding row: of the answer, and of the prompt.

    A long answer decodes in more steps, so each request counts by its decode steps.
    """
    workload = scenario.workload
    outputs = workload.outputs
    steps = outputs.mean - 1
    if steps <= 0:
        return 1.0, workload.prompts.mean
    generated = outputs.expect(lambda length: (length - 1) * length / 2) / steps
    columns = zip(outputs.lengths, outputs.shares, workload.mean_prompts, strict=True)
    return generated, sum(share * (length - 1) * prompt for length, share, prompt in columns) / steps
