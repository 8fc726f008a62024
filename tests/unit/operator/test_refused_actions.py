"""Actions that the API server refuses are retried less and less often."""

from dataclasses import replace

from orca.operator.domain import names
from orca.operator.domain.actions import Action, Annotate, Apply, Delete, IssueCertificate
from orca.operator.domain.api_refusals import WAIT_MAX_S, Refusal, Refusals
from orca.operator.domain.resource import OrcaDeployment
from orca.operator.plan.plan import make_plan
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment

SHOP = deployment()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def apply(name: str = "shop") -> Apply:
    return Apply({"kind": "Service", "metadata": {"name": name}}, "it is missing")


def is_tried(refusals: Refusals, action: Action, of: OrcaDeployment = SHOP) -> bool:
    """Reconcile once, and refuse the action if it is tried."""
    refusals.begin(of, [action])
    if refusals.waiting(of, action) is not None:
        return False
    refusals.record(of, Refusal(action, "no"))
    return True


def test_each_refusal_delays_the_next_try_up_to_a_bound() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    tries = []
    for second in range(3600):
        clock.now_s = second
        if is_tried(refusals, apply()):
            tries.append(second)
    assert tries[:5] == [0, 5, 15, 35, 75]
    assert tries[-1] - tries[-2] == WAIT_MAX_S


def test_a_changed_spec_a_changed_object_or_a_new_operator_tries_at_once() -> None:
    refusals = Refusals(Clock())
    assert is_tried(refusals, apply())
    assert not is_tried(refusals, apply())
    assert is_tried(refusals, apply(), replace(SHOP, generation=2))
    assert is_tried(refusals, apply("another"))
    assert is_tried(Refusals(Clock()), apply())


def test_an_action_that_differs_only_by_time_waits_too() -> None:
    clock = Clock()
    shop = FakeCluster(deployment())
    refusals = Refusals(clock)
    tries = 0
    for _ in range(30):
        clock.now_s += 2
        shop.now_s += 2
        decided = make_plan(shop.observed)
        [scheduler] = [each for each in decided.actions if is_scheduler(each)]
        tries += is_tried(refusals, scheduler)
    assert tries == 4  # after 0, 5, 15 and 35 seconds


def is_scheduler(action: Action) -> bool:
    labels = action.manifest["metadata"]["labels"] if isinstance(action, Apply) else {}
    return names.GENERATION_LABEL in labels


def test_refusals_of_actions_that_are_no_longer_planned_are_forgotten() -> None:
    refusals = Refusals(Clock())
    is_tried(refusals, apply())
    refusals.begin(SHOP, [])
    assert is_tried(refusals, apply())
    refusals.keep({"another"})
    assert is_tried(refusals, apply())


def test_refused_deletes_annotations_and_certificates_wait_too() -> None:
    refusals = Refusals(Clock())
    marks = Annotate("Pod", "p", "uid", {}, "new"), Annotate("PersistentVolumeClaim", "c", "uid-2", {}, "new")
    for action in (Delete("Pod", "p", "uid", "gone"), *marks, IssueCertificate("it ends", None)):
        assert is_tried(refusals, action)
        assert not is_tried(refusals, action)
