"""Expected values of iteration-level scheduling under load (the policy `iteration`); ExeGPT has no formulas for it.

Requests never run out, so each of the batches in flight, one per stage, has b = `max_batch_size` members. A request of
s tokens is a member for W + s - 1 steps: W until its prompt has run, which draws the first token, then one for each
further token. By Little's law so many requests enter with a step:

    X = b / (E[s] - 1 + W)

Without `max_batch_tokens` W is 1. With it, prompts share what the d = X * (E[s] - 1) decoding rows of a step leave, C =
max_batch_tokens - d tokens, first come, first served (queues/prompt_queue.py).

Steps with prompts are longer than steps without. With one stage only their mean counts. With several, each stage also
waits for longer steps of other batches. So steps that represent all of them, in mixed order, pass through the recursion
of the pipeline (step_mix.py).
"""

from math import inf

from orca.planner.simulate.estimate import Estimate, Scenario
from orca.planner.simulate.iteration_times import iteration_times
from orca.planner.simulate.queues.arrivals import latency_at_rate
from orca.planner.simulate.queues.iteration_loads import loads_at_rate
from orca.planner.simulate.reserved import iteration_need


def estimate_iteration(
    scenario: Scenario, batch_size: int, batch_tokens: int | None = None, *, rate: float | None = None
) -> Estimate:
    """Return the expected values of one pair of bounds.

    Args:
        batch_size: `max_batch_size`, requests in a step.
        batch_tokens: `max_batch_tokens`, tokens in a step; None: prompts run whole.
        rate: requests per second that arrive; latencies begin with the submission then. None: as many as can be
            served, and latencies begin with the first step.
    """
    assert batch_size >= 1, "a batch has at least one request"
    assert batch_tokens is None or batch_tokens > batch_size, "no token would be left for prompts"
    full = iteration_times(scenario, scenario.stages * batch_size, batch_tokens)
    times = full
    if rate is None:
        latency, first = full.latency_percentile(scenario), full.prompt_high_us
    elif rate >= full.throughput:
        latency = first = inf
    else:
        loads = loads_at_rate(scenario, scenario.stages * batch_size, batch_tokens, rate, full)
        times = loads.mean_times
        latency = latency_at_rate(scenario, loads.latencies())
        first = latency_at_rate(scenario, loads.first_tokens())
    throughput = full.throughput if rate is None else min(rate, full.throughput)
    requests = times.members.members * times.steps.batches
    needed = iteration_need(scenario).of(requests)
    return Estimate(
        throughput=throughput,
        capacity=full.throughput,
        tokens_per_s=throughput * scenario.workload.outputs.mean,
        latency_s=latency / 1e6,
        ttft_s=first / 1e6,
        tpot_s=times.token_percentile(scenario) / 1e6,
        decode_batch=times.members.decoding,
        cycle_s=times.steps.rotation / 1e6,
        bubbles=max(1 - times.steps.busy / times.steps.period, 0.0),
        slots_needed=needed,
        fits=needed <= scenario.capacity.slots,
        details={"entering": times.members.entering, "prompt_steps": times.members.prompt_steps},
    )
