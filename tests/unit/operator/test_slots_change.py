"""An edit of kvSlots takes effect, and no request that was accepted is left without a group that can run it."""

from datetime import UTC, datetime
from typing import Any

import pytest

from orca.operator.domain import names
from orca.operator.domain.actions import PromiseSlots
from orca.operator.domain.observation import PoolStatus
from orca.operator.plan.plan import ReconcilePlan
from orca.operator.plan.slots_change import SlotsChange, slots_that_some_exceed
from orca.operator.plan.status import make_status
from support.operator.clusters import BORN, BORN_S, FakeCluster
from support.operator.deployments import deployment
from support.operator.slots_shop import MEMORY, SlotsShop


def given(slots: int | None, **spec: Any) -> dict[str, Any]:
    return {**spec, "scheduler": {} if slots is None else {"kvSlots": slots}}


def promises(decided: ReconcilePlan) -> list[int]:
    return [action.slots for action in decided.actions if isinstance(action, PromiseSlots)]


def condition(shop: SlotsShop, decided: ReconcilePlan, kind: str) -> tuple[str, str, str]:
    written = make_status(shop.cluster.observe(at=BORN), decided, {})
    [found] = [each for each in written["conditions"] if each["type"] == kind]
    return found["status"], found["reason"], found["message"]


@pytest.mark.covered(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "spec",
    [{"replicas": 1}, {"replicas": 3}, {"replicas": 2, "rollout": {"maxSurge": 0, "maxUnavailable": 1}}],
    ids=["one", "three", "two-in-turn"],
)
def test_fewer_and_more_slots_take_effect_without_losing_requests(seed: int, spec: dict[str, Any]) -> None:
    shop = SlotsShop(seed, **given(4096, **spec))
    for slots in (1024, 2048, 1000, 4096):
        shop.change(**given(slots, **spec))
        shop.settle()
        assert shop.promised == slots // 16 * 16
    assert shop.lost == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(8))
def test_further_edits_during_a_slots_change_lose_nothing(seed: int) -> None:
    shop = SlotsShop(seed, **given(4096))
    for slots in (1024, 2048, None, 1024, 4096, 2048):
        stages, replicas = shop.chance.choice((1, 2)), shop.chance.choice((1, 2, 3))
        shop.change(**given(slots, replicas=replicas, parallelism={"stages": stages}))
        for _ in range(shop.chance.randrange(25)):
            shop.move()
            shop.reconcile()
    shop.settle()
    assert (shop.promised, shop.lost) == (2048, 0)


def begun(slots: int | None = 1024, *needs: int, **spec: Any) -> SlotsShop:
    """Asked for so many slots where there were 4096, while requests of such needs have not ended."""
    shop = SlotsShop(**given(4096, **spec))
    shop.needs = [*needs] or [2000]
    shop.change(**given(slots, **spec))
    return shop


def test_the_pool_gets_the_lower_bound_first_and_schedulers_change_after_the_last_larger_request() -> None:
    shop = begun(1024, 2000, 3000, 100)
    assert promises(shop.reconcile()) == [1024]
    assert shop.reconcile().actions == ()
    assert shop.slots() == [4096]
    said = "groups stay as they are for 2 requests that may need more than kvSlots 1024, up to 3000"
    for kind in ("SchedulerReady", "Progressing", "Ready"):
        assert condition(shop, shop.reconcile(), kind) == ("True", "SlotsAreNeeded", said)
    assert condition(shop, shop.reconcile(), "Degraded")[0] == "False"
    shop.needs = [100]
    shop.reconcile()
    assert shop.slots() == [1024]
    assert condition(shop, shop.reconcile(), "Ready")[:2] == ("False", "SchedulersChanging")


def test_the_reconcile_that_lowers_the_bound_changes_no_scheduler_even_without_larger_requests() -> None:
    shop = begun(1024, 100)
    assert promises(shop.reconcile()) == [1024]
    assert shop.slots() == [4096]
    assert condition(shop, shop.reconcile(), "Progressing")[0] == "True"
    assert shop.slots() == [1024]


def test_a_request_that_no_existing_group_could_run_delays_nothing() -> None:
    shop = SlotsShop(**given(4096))
    shop.needs = [3000]
    for spec in (given(4096, replicas=0), given(2048, replicas=0), given(2048)):
        shop.change(**spec)
        shop.settle()
    assert (3000 in shop.needs, shop.formed()) == (True, [2048])
    shop.change(**given(1024, replicas=3))
    shop.settle()
    assert condition(shop, shop.reconcile(), "SchedulerReady") == ("True", "Formed", "3 groups are formed")


def test_larger_requests_are_counted_only_while_some_group_has_more_slots() -> None:
    shop = SlotsShop(**given(1024, replicas=2))

    def asked() -> int | None:
        return slots_that_some_exceed(shop.cluster.observed)

    assert asked() is None
    shop.change(**given(2048, replicas=2))
    assert asked() is None
    shop.change(**given(1000, replicas=2))
    assert asked() == 992
    shop.settle()
    assert asked() is None
    shop.change(**given(None))
    shop.settle()
    assert asked() is None
    shop.change(**given(1024))
    assert asked() == 1024


def test_only_groups_that_can_hold_a_larger_request_are_kept() -> None:
    shop = begun(1024, 3000, replicas=2)
    shop.reconcile()
    shop.schedulers()[0]["metadata"]["annotations"][names.SLOTS_ANNOTATION] = "2048"
    decided = shop.reconcile()
    assert (sorted(shop.slots()), len(decided.slots.held)) == ([1024, 4096], 1)


def test_a_scheduler_that_restarts_during_the_change_forms_with_its_old_slots() -> None:
    shop = begun()
    shop.reconcile()
    shop.restart()
    shop.reconcile()
    shop.form()
    assert shop.formed() == [4096]
    shop.end()
    shop.reconcile()
    assert shop.slots() == [1024]


def test_a_new_parallelism_waits_for_the_slots_change_and_the_old_groups_are_kept() -> None:
    shop = begun(1024, 2000, parallelism={"stages": 1})
    shop.change(**given(1024, parallelism={"stages": 2}))
    for _ in range(3):
        decided = shop.reconcile()
    assert (shop.slots(), len(decided.groups)) == ([4096], 1)
    assert condition(shop, decided, "Ready")[:2] == ("False", "SlotsAreNeeded")
    shop.needs.clear()
    shop.settle()
    assert shop.lost == 0


def test_no_new_group_is_created_while_larger_requests_run() -> None:
    shop = begun()
    shop.change(**given(1024, replicas=3))
    shop.reconcile()
    shop.reconcile()
    assert shop.slots() == [4096]
    shop.needs.clear()
    shop.settle()
    assert shop.formed() == [1024] * 3


@pytest.mark.parametrize("spec", [{"replicas": 0}, {"suspend": True}], ids=["none", "suspended"])
def test_scaling_to_no_groups_takes_effect_at_once(spec: dict[str, Any]) -> None:
    shop = begun()
    shop.reconcile()
    shop.change(**given(1024, **spec))
    shop.reconcile()
    assert shop.slots() == []


def test_the_groups_are_kept_while_the_pool_does_not_answer_and_the_bound_is_written_later() -> None:
    shop = begun(1024, 100)
    shop.pool_problem = "no answer"
    for _ in range(3):
        assert shop.reconcile().actions == ()
    assert condition(shop, shop.reconcile(), "Progressing")[:2] == ("True", "SlotsAreNeeded")
    shop.pool_problem = None
    assert promises(shop.reconcile()) == [1024]
    shop.settle()


def test_a_group_whose_slots_follow_from_its_memory_may_be_needed_too() -> None:
    shop = SlotsShop(**given(None))
    shop.needs = [3000]
    shop.change(**given(2048))
    shop.reconcile()
    shop.reconcile()
    assert (shop.promised, shop.slots()) == (2048, [MEMORY])


@pytest.mark.parametrize(("length", "promised"), [(None, 1024), (3000, 3000), (512, 1024)])
def test_without_a_number_in_the_spec_the_promise_rises_to_the_slots_that_are_always_available(
    length: int | None, promised: int
) -> None:
    shop = SlotsShop(length=length, **given(1024))
    shop.change(**given(None))
    shop.settle()
    assert (shop.promised, shop.formed()) == (promised, [MEMORY])
    assert shop.reconcile().slots == SlotsChange()


def test_a_longer_context_is_promised_when_all_groups_have_it() -> None:
    shop = SlotsShop(length=512, **given(None, replicas=2))
    shop.promised = 512
    shop.length = 1024
    shop.restart()
    assert promises(shop.reconcile()) == []
    shop.form()
    assert promises(shop.reconcile()) == [1024]


def test_more_slots_are_promised_when_all_groups_have_them() -> None:
    shop = SlotsShop(**given(1024, replicas=2))
    shop.change(**given(2048, replicas=2))
    told = []
    while shop.formed() != [2048, 2048]:
        told += promises(shop.reconcile())
        shop.restart()
        told += promises(shop.reconcile())  # what is formed has more, and one is not
        shop.form()
    assert (told, shop.promised) == ([], 1024)
    while not promises(shop.reconcile()):
        assert shop.promised == 1024
    assert shop.promised == 2048


def test_a_scheduler_that_has_not_yet_restarted_has_not_formed_with_its_new_slots() -> None:
    cluster = FakeCluster(deployment(**given(1024, replicas=2)))
    cluster.settle()
    in_force = {"revision": "r1", "generation": int(BORN_S) + 1}
    cluster.deployment = deployment(generation=2, **given(2048, replicas=2))
    cluster.pool = PoolStatus(**in_force, promised_slots=1024, offered_slots=1024)
    cluster.reconcile()
    cluster.start()
    cluster.reconcile()
    # What the pool says of the first one, asked when the second had given its seat back.
    cluster.pool = PoolStatus(**in_force, promised_slots=1024, offered_slots=2048)
    assert promises(cluster.reconcile()) == []
    cluster.start()
    assert promises(cluster.reconcile()) == [2048]


def test_no_more_is_promised_than_the_groups_offer_to_one_request() -> None:
    cluster = FakeCluster(deployment(**given(4096)))
    cluster.settle()
    in_force = {"revision": "r1", "generation": int(BORN_S) + 1}
    cluster.pool = PoolStatus(**in_force, promised_slots=512, offered_slots=1024)
    assert promises(cluster.reconcile()) == [1024]
    cluster.pool = PoolStatus(**in_force, promised_slots=1024, offered_slots=1024)
    assert cluster.reconcile().actions == ()
    cluster.pool = PoolStatus(**in_force, promised_slots=512, offered_slots=None)
    decided = cluster.reconcile()
    assert (decided.actions, decided.slots.is_open) == ((), True)  # the next reconcile may know


def broken(shop: SlotsShop, **container: Any) -> None:
    """Its one group does not serve."""
    [scheduler] = shop.schedulers()
    shop.restart()
    pod = shop.cluster.objects["Pod", f"{scheduler['metadata']['name']}-0"]
    pod["status"]["containerStatuses"] = [{"name": "scheduler", "ready": False, "restartCount": 1, **container}]


def test_a_group_that_can_never_serve_with_its_slots_does_not_block_its_replacement() -> None:
    shop = begun(2048, 1500, 3000)
    shop.reconcile()
    broken(shop, lastState={"terminated": {"exitCode": 2, "message": "slots: 4096 are wanted"}})
    shop.reconcile()
    assert shop.slots() == [2048]
    assert condition(shop, shop.reconcile(), "SchedulerReady")[:2] == ("False", "BadConfiguration")
    while shop.formed() != [2048]:
        shop.restart()
        shop.form()
    assert condition(shop, shop.reconcile(), "SchedulerReady") == ("True", "Formed", "1 groups are formed")


def test_a_group_that_does_not_start_within_its_startup_time_is_no_longer_waited_for() -> None:
    shop = begun()
    shop.reconcile()
    broken(shop, state={"running": {}})
    shop.cluster.now_s = BORN_S + shop.cluster.deployment.spec.startup_seconds
    shop.reconcile()
    assert shop.slots() == [4096]
    shop.cluster.now_s += 1
    shop.reconcile()
    assert shop.slots() == [1024]


def test_time_without_a_pool_does_not_count_as_startup_time_of_a_group() -> None:
    shop = begun(1024, 3000)
    shop.reconcile()
    shop.restart()
    shop.pool_problem = "no answer"
    shop.cluster.now_s = BORN_S + 2 * shop.cluster.deployment.spec.startup_seconds
    shop.reconcile()
    assert shop.slots() == [4096]
    shop.pool_problem = None
    [condition] = shop.cluster.objects["Pod", "shop-pool-0"]["status"]["conditions"]
    condition["lastTransitionTime"] = datetime.fromtimestamp(shop.cluster.now_s, UTC).isoformat()
    shop.cluster.now_s += shop.cluster.deployment.spec.startup_seconds
    shop.reconcile()
    assert (shop.slots(), shop.lost) == ([4096], 0)
    shop.cluster.now_s += 1
    shop.reconcile()
    assert shop.slots() == [1024]


def test_another_model_has_its_own_promise_and_does_not_wait() -> None:
    shop = begun()
    shop.change(model={"uri": "file:///other"}, **given(1024))
    for _ in range(3):
        assert promises(shop.reconcile()) == []
        assert 4096 in shop.slots()
    assert sorted(shop.slots()) == [1024, 4096]


OTHER = {"model": {"uri": "file:///other"}}


@pytest.mark.parametrize("seed", range(4))
def test_a_new_image_with_the_same_weights_and_fewer_slots_waits_for_larger_requests(seed: int) -> None:
    shop = SlotsShop(seed, **given(4096))
    shop.is_one_revision = True
    shop.needs = [2000]
    shop.change(**given(1024, **OTHER))
    for _ in range(10):
        shop.restart()
        shop.reconcile()
        shop.form()
    assert shop.promised == 1024
    assert sorted(shop.slots()) == [1024, 4096]
    assert 4096 in shop.formed()
    shop.settle()
    assert (shop.promised, shop.formed(), shop.lost) == (1024, [1024], 0)


def test_a_model_without_groups_does_not_get_the_promise_of_another_model() -> None:
    shop = SlotsShop(**given(4096))
    for spec in (given(4096, replicas=0), given(1024, replicas=0, **OTHER), given(1024, **OTHER)):
        shop.change(**spec)
        shop.cluster.now_s += 10
        for _ in range(3):
            assert promises(shop.reconcile()) == []
            shop.form()
    assert (shop.promised, shop.slots()) == (4096, [1024])


def test_a_model_that_came_back_without_groups_gets_its_promise_when_one_is_alive() -> None:
    shop = SlotsShop(**given(4096))
    for spec in (given(4096, replicas=0), given(1024, replicas=0, **OTHER), given(1024)):
        shop.change(**spec)
        shop.cluster.now_s += 10
        for _ in range(3):
            assert promises(shop.reconcile()) == []
    shop.form()
    assert shop.formed() == []  # less than what is promised
    assert promises(shop.reconcile()) == [1024]
    shop.form()
    assert shop.formed() == [1024]
