"""The promise of a group of an encoder-decoder model: every split that it accepts fits, and none is refused in vain."""

import pytest

from orca.core.domain.errors import NeverFits
from orca.core.domain.request import FinishReason, tokens_of_any_split
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions, flat_errors
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import Policy
from orca.scheduler.policy.request_level import RequestLevelPolicy
from support.scheduler.scheduler_simulation import a_request, a_shape, a_simulation, serving

LENGTH, BLOCK = 22, 4
SPLITS = [(source, total - source) for total in range(3, LENGTH + 1) for source in range(1, total - 1)]
FULL = 28
"""Slots of the most expensive split: 22 tokens are 1 + 21, and need 1 + 6 blocks."""


@pytest.mark.parametrize(
    ("slots", "promised", "policy"),
    [
        (64, FULL, IterationPolicy()),
        (64, FULL, RequestLevelPolicy()),
        (28, FULL, IterationPolicy()),
        (24, 24, IterationPolicy()),
        (8, 8, IterationPolicy()),
    ],
    ids=str,
)
def test_every_split_that_the_pool_accepts_runs_and_only_what_has_no_slots_is_refused(
    slots: int, promised: int, policy: Policy
) -> None:
    async def run() -> None:
        simulation = a_simulation(policy=policy, choices=SchedulingOptions(max_batch_size=8, is_encoder_decoder=True))
        shape = a_shape(slots=slots, block_tokens=BLOCK, max_model_len=LENGTH)
        simulation.start(group := simulation.add_group(shape, cost=LinearCost(step_us=100)))
        await serving(simulation, group)
        assert (await simulation.pool.stats()).promised_slots == promised
        for source, target in SPLITS:
            request = a_request(f"r{source}-{target}", prompt=source, prefix=1, new=target - 1)
            if request.slots(BLOCK) <= slots:
                await simulation.submit(request)
            else:
                assert source + target > tokens_of_any_split(promised, BLOCK), "such a length fits in any split"
                with pytest.raises(NeverFits):
                    await simulation.submit(request)
        await simulation.finish()
        for request in simulation.submitted.values():
            tokens, end = await simulation.log_of(request.id)
            assert end is not None
            assert (end.reason, len(tokens)) == (FinishReason.LENGTH, request.max_new_tokens)

    virtual_time.run(run())


@pytest.mark.parametrize(("slots", "block"), [(4, 4), (16, 16), (2, 1)])
def test_a_group_without_slots_for_any_request_says_so(slots: int, block: int) -> None:
    async def run() -> None:
        simulation = a_simulation(choices=SchedulingOptions(is_encoder_decoder=True))
        group = simulation.add_group(a_shape(slots=slots, block_tokens=block, max_model_len=LENGTH))
        simulation.start(group)
        assert group.task is not None
        with pytest.raises(ExceptionGroup) as failed:
            await group.task
        (error,) = flat_errors(failed.value)
        least = max(2 * block, 3)
        assert f"has {slots} KV slots, and the smallest request needs {least}" in str(error)
        assert (await simulation.pool.stats()).revision is None

    virtual_time.run(run())


def test_a_group_with_fewer_slots_than_the_promise_does_not_form() -> None:
    async def run() -> None:
        choices = SchedulingOptions(is_encoder_decoder=True)
        simulation = a_simulation(choices=choices)
        groups = [
            simulation.add_group(a_shape(slots=slots, block_tokens=BLOCK, max_model_len=LENGTH), name=f"g{slots}")
            for slots in (FULL, FULL - BLOCK)
        ]
        for group in groups:
            simulation.start(group)
            if group is groups[0]:
                await serving(simulation, group)
        await simulation.until(lambda: _has_failed(groups[1].logs[0].reasons))
        assert f"{FULL} were promised" in groups[1].logs[0].reasons[0]
        await simulation.stop()

    virtual_time.run(run())


def test_a_model_does_not_take_over_while_the_pool_cannot_store_its_requests() -> None:
    """Its group forms when the number is raised. A model that is in force has requests to finish, also after a fall."""

    async def run() -> None:
        simulation = a_simulation(choices=SchedulingOptions(is_encoder_decoder=True))
        await simulation.pool.set_schema(2)
        await simulation.pool.promise_slots("decoder-only", 64)
        await simulation.pool.set_revision("decoder-only", 0)
        first = simulation.add_group(a_shape(block_tokens=BLOCK, max_model_len=LENGTH))
        simulation.start(first)
        await simulation.until(lambda: _has_failed(first.logs[0].reasons))
        assert "schema 2 of the release before is in force" in first.logs[0].reasons[0]
        assert (await simulation.pool.stats()).revision == "decoder-only"
        assert await simulation.pool.set_schema(3) == 3
        await serving(simulation, first)
        assert await simulation.pool.set_schema(2) == 2
        second = simulation.add_group(a_shape(block_tokens=BLOCK, max_model_len=LENGTH), name="g1")
        simulation.start(second)
        await serving(simulation, second)
        await simulation.stop()

    virtual_time.run(run())


async def _has_failed(reasons: list[str]) -> bool:
    return bool(reasons)
