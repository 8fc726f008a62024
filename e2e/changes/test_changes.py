"""Every planned change of a running service, with streams open: nothing fails, and nobody reads another answer.

The plain client may wait, as it does when the pool holds its request while no group runs, and it may try again what a
gateway refused; a stream that broke, an error or another text fails the scenario. Each change is made twice: with the
operator at work, and with an operator whose pod is killed as soon as it has seen the edit.
"""

import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from cluster.images.loading import name_again
from figures import note
from installation import Json, Service, own_layout, uids, wait_until
from load import MODEL, PROMPTS, Load
from target import OURS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PODS_OF = {"gateway": "gateway", "scheduler": "scheduler", "worker": "stage"}
"""Role of an image -> role of the pods that it runs in."""

LARGE_SLOTS, SMALL_SLOTS = 512, 256
"""The first is what the longest request of the model needs, so one at a time runs."""
LARGE_TOKENS, LARGE_ANSWERS = 400, 8
"""More than fits into the smaller number, and enough of them for an operator that comes back."""
LARGE_S = 180.0

Steps = Callable[[Service], Iterator[None]]


@dataclass(frozen=True)
class Change:
    """Some edits, each followed by a `yield`, where the operator may die, and by a wait for what it leads to."""

    name: str
    steps: Steps
    new_pods: int | None = None  # that it needs, where it is known and nothing else goes wrong
    is_on_nodes: bool = False  # it is begun on the nodes themselves


def edited(**spec: object) -> Steps:
    def steps(service: Service) -> Iterator[None]:
        service.edit(**spec)
        yield
        service.wait_settled()

    return steps


def scaled(replicas: int) -> Steps:
    def steps(service: Service) -> Iterator[None]:
        service.scale(replicas)
        yield
        service.wait_settled()

    return steps


def none_for_a_while(service: Service) -> Iterator[None]:
    service.scale(0)
    yield
    service.wait_for("Ready", "True", "Holding")
    wait_until(lambda: not service.pods("stage"), service.story)
    wait_until(lambda: service.get()["status"]["requests"]["queued"] >= 4, service.story)  # one of each client
    service.scale(1)
    yield
    service.wait_settled()


def smaller_batch(service: Service) -> Iterator[None]:
    [pod] = service.pods("scheduler")
    service.edit(scheduler={"maxBatchSize": 8})
    yield
    told = ("logs", pod["metadata"]["name"], f"--namespace={service.namespace}")
    wait_until(lambda: '"max_batch_size":8' in service.kubectl(*told).replace(" ", ""), service.story)
    service.wait_settled()


def fewer_slots_and_more(service: Service) -> Iterator[None]:
    """While requests wait that fewer slots cannot hold: the groups that can stay until all have their answers."""
    service.edit(scheduler={"kvSlots": LARGE_SLOTS})
    yield
    service.wait_settled()
    wait_until(lambda: ready(service).get("max_total_tokens") == LARGE_SLOTS, service.story)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, service, LARGE_TOKENS, LARGE_ANSWERS)
        wait_until(lambda: requests(service) >= LARGE_ANSWERS, service.story)
        service.edit(scheduler={"kvSlots": SMALL_SLOTS})
        yield
        wait_until(lambda: answer.done() or service.condition("Ready")[:2] == ("True", "SlotsAreNeeded"), service.story)
        assert answer.result() == (200, LARGE_TOKENS * LARGE_ANSWERS)
    service.wait_settled()
    wait_until(lambda: ready(service).get("max_total_tokens") == SMALL_SLOTS, service.story)
    assert ask(service, LARGE_TOKENS) == (400, 0), "what no group can hold was let in"
    service.edit(scheduler={"kvSlots": LARGE_SLOTS})
    yield
    service.wait_settled()
    wait_until(lambda: ready(service).get("max_total_tokens") == LARGE_SLOTS, service.story)
    assert ask(service, LARGE_TOKENS) == (200, LARGE_TOKENS)


def ready(service: Service) -> Json:
    """What a gateway says of itself; nothing where there is no answer."""
    url = service.base_url.removesuffix("/v1") + "/ready"
    try:
        found = httpx.get(url, headers=service.headers, timeout=5)
    except httpx.HTTPError:
        return {}
    return found.json() if found.status_code == 200 else {}


def requests(service: Service) -> int:
    """That wait or run."""
    found = ready(service)
    return (found.get("waiting") or 0) + (found.get("running") or 0)


def ask(service: Service, tokens: int, answers: int = 1) -> tuple[int, int]:
    """Status, and how many tokens came."""
    headers = {**service.headers, "Authorization": f"Bearer {service.api_key()}"}
    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": tokens, "n": answers, "ignore_eos": True}
    found = httpx.post(f"{service.base_url}/completions", json=body, headers=headers, timeout=LARGE_S)
    return found.status_code, found.json()["usage"]["completion_tokens"] if found.status_code == 200 else 0


def gateways(replicas: int) -> Steps:
    def steps(service: Service) -> Iterator[None]:
        service.edit(gateway={"replicas": replicas})
        yield
        wait_until(lambda: len(service.pods("gateway")) == replicas, service.story, within_s=120)
        service.wait_settled()

    return steps


def gateways_anew(service: Service) -> Iterator[None]:
    """As by a new image: every gateway pod is another one."""
    old = uids(service.pods("gateway"))
    service.edit(gateway={"podPatch": made_anew()})
    yield
    wait_until(lambda: not old & uids(service.pods("gateway")), service.story, within_s=180)
    service.wait_settled()


def stages_anew(service: Service) -> Iterator[None]:
    service.edit(worker={"podPatch": made_anew()})
    yield
    service.wait_settled()


def made_anew() -> Json:
    """A patch that nobody has seen before."""
    return {"metadata": {"annotations": {"made": secrets.token_hex(4)}}}


def images_of(tag: str) -> Steps:
    """As a release does. It is the same program, so that it must say the same; nobody but us knows that."""

    def steps(service: Service) -> Iterator[None]:
        names = {role: f"{OURS.registry}/orca-{role}" for role in ("gateway", "scheduler", "worker")}
        for node, name in itertools.product(own_layout().nodes, names.values()):
            name_again(node, f"{name}:{OURS.tag}", f"{name}:{tag}")
        service.edit(images={role: f"{name}:{tag}" for role, name in names.items()})
        yield
        service.wait_settled()
        running = {pod["spec"]["containers"][0]["image"] for role in names for pod in service.pods(PODS_OF[role])}
        assert running == {f"{name}:{tag}" for name in names.values()}

    return steps


def reverted(service: Service) -> Iterator[None]:
    """In the middle of a rollout; what served before serves again, with the same pods."""
    before = uids(service.pods("stage"))
    service.edit(parallelism={"stages": 2})
    wait_until(lambda: len(service.pods("stage")) == 3, service.story)
    service.edit(parallelism={"stages": 1})
    yield
    service.wait_settled()
    assert uids(service.pods("stage")) == before


def three_edits(service: Service) -> Iterator[None]:
    service.edit(parallelism={"stages": 2})
    service.edit(scheduler={"prefetch": 0})
    service.edit(replicas=2, parallelism={"stages": 1})
    yield
    service.wait_settled()
    service.edit(replicas=1, scheduler={"prefetch": 1})
    yield
    service.wait_settled()


def replaced(service: Service) -> Iterator[None]:
    found = service.get()
    found.pop("status")
    found["metadata"].pop("resourceVersion")  # the operator may write a status meanwhile, which is no conflict here
    found["spec"]["scheduler"]["maxBatchSize"] = 16
    service.kubectl("replace", "--filename=-", entered=json.dumps(found))
    yield
    service.wait_settled()


def deleted_and_made_again(service: Service) -> Iterator[None]:
    """As tools do that must write a field which cannot be changed: its children stay and are taken up again."""
    resource = service.get()
    where = f"--namespace={service.namespace}"
    service.kubectl("delete", "orca", service.name, where, "--cascade=orphan")
    service.create(resource["spec"])
    yield
    service.wait_settled()


CHANGES = (
    Change("scale 1 to 3", scaled(3), new_pods=4),
    Change("scale 3 to 1", scaled(1), new_pods=0),
    Change("scale 1 to 0 to 1", none_for_a_while, new_pods=2),
    Change("stages 1 to 2", edited(parallelism={"stages": 2}), new_pods=3),
    Change("stages 2 to 1", edited(parallelism={"stages": 1}), new_pods=2),
    Change("tensor 1 to 2", edited(parallelism={"tensor": 2}), new_pods=2),
    Change("tensor 2 to 1", edited(parallelism={"tensor": 1}), new_pods=2),
    Change("batch size 16 to 8", smaller_batch, new_pods=0),
    Change("fewer slots and more", fewer_slots_and_more, new_pods=1),
    Change("slots as they come", edited(scheduler={"kvSlots": None}), new_pods=1),
    Change("gateways 1 to 3", gateways(3), new_pods=2),
    Change("gateways 3 to 1", gateways(1), new_pods=0),
    Change("gateways replaced", gateways_anew, new_pods=1),
    Change("stages replaced", stages_anew, new_pods=2),
    Change("new images", images_of("next"), new_pods=3, is_on_nodes=True),
    Change("images as before", images_of(OURS.tag), new_pods=3, is_on_nodes=True),
    Change("revert in mid-rollout", reverted),
    Change("three edits", three_edits),
    Change("kubectl replace", replaced, new_pods=0),
    Change("delete and re-create", deleted_and_made_again, new_pods=0),
)


@pytest.mark.parametrize(
    "change",
    [pytest.param(each, id=each.name, marks=[pytest.mark.own_cluster] if each.is_on_nodes else []) for each in CHANGES],
)
@pytest.mark.parametrize("operator", ["stays", "dies"])
def test_nobody_notices(service: Service, load: Load, change: Change, operator: str) -> None:
    before, edits = uids(service.pods()), 0
    with load.running():
        began = time.monotonic()
        for _ in change.steps(service):
            edits += 1
            if operator == "dies":
                service.kill_operator_at_work()
        seconds = time.monotonic() - began
    figures: Json = {
        "seconds": round(seconds, 1),
        "operators killed": edits if operator == "dies" else 0,
        "new_pods": len(uids(service.pods()) - before),
        **load.summary(),
    }
    note(f"{change.name}, operator {operator}", figures)
    load.check()
    assert operator == "dies" or change.new_pods in (None, figures["new_pods"]), "pods were restarted for nothing"
