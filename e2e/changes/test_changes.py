"""Every planned change of a running service, with open streams: nothing fails, and no client gets a wrong answer.

The plain client may wait, for example when the pool holds its request while no group runs, and it may try a refused
call again. A broken stream, an error or another text fails the scenario. Each change is made twice: with a running
operator, and with an operator whose pod is killed after it has observed the edit.
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

from cluster.images.loading import add_image_name
from figures import record_figures
from installation import Json, Service, own_layout, uids, wait_until
from load import MODEL, PROMPTS, Load
from target import OURS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PODS_OF = {"gateway": "gateway", "scheduler": "scheduler", "worker": "stage"}
"""Role of an image -> role of its pods."""

LARGE_SLOTS, SMALL_SLOTS = 512, 256
"""The first is the need of the model's longest request, so that one request runs at a time."""
LARGE_TOKENS, LARGE_ANSWERS = 400, 8
"""More tokens than fit into the smaller number, and enough answers for the time of an operator's restart."""
LARGE_S = 180.0

Steps = Callable[[Service], Iterator[None]]


@dataclass(frozen=True)
class Change:
    """Some edits, each with a `yield` after it, where the operator may die, and a wait for its result."""

    name: str
    steps: Steps
    new_pods: int | None = None  # number of new pods without other faults; None: not known
    is_on_nodes: bool = False  # it starts on the nodes themselves


def edited(**spec: object) -> Steps:
    def steps(service: Service) -> Iterator[None]:
        service.edit(**spec)
        yield
        service.wait_until_settled()

    return steps


def scaled(replicas: int) -> Steps:
    def steps(service: Service) -> Iterator[None]:
        service.scale(replicas)
        yield
        service.wait_until_settled()

    return steps


def none_for_a_while(service: Service) -> Iterator[None]:
    service.scale(0)
    yield
    service.wait_for("Ready", "True", "Holding")
    wait_until(lambda: not service.pods("stage"), service.describe)
    wait_until(lambda: service.get()["status"]["requests"]["queued"] >= 4, service.describe)  # one of each client
    service.scale(1)
    yield
    service.wait_until_settled()


def smaller_batch(service: Service) -> Iterator[None]:
    [pod] = service.pods("scheduler")
    service.edit(scheduler={"maxBatchSize": 8})
    yield
    logs = ("logs", pod["metadata"]["name"], f"--namespace={service.namespace}")
    wait_until(lambda: '"max_batch_size":8' in service.kubectl(*logs).replace(" ", ""), service.describe)
    service.wait_until_settled()


def round_robin(service: Service) -> Iterator[None]:
    """Change the policy, which replaces the scheduler, then a control, which replaces nothing, and back."""
    controls = {"encodeBatch": 4, "decodeSteps": 8}
    service.edit(scheduler={"policy": "rra", "rra": controls})
    yield
    service.wait_until_settled()
    [pod] = service.pods("scheduler")
    service.edit(scheduler={"rra": {"decodeSteps": 3}})
    yield
    logs = ("logs", pod["metadata"]["name"], f"--namespace={service.namespace}")
    wait_until(lambda: '"decode_steps":3' in service.kubectl(*logs).replace(" ", ""), service.describe)
    service.wait_until_settled()
    assert uids(service.pods("scheduler")) == uids([pod])
    service.edit(scheduler={"policy": "iteration", "rra": None})
    yield
    service.wait_until_settled()


def ordered(service: Service) -> Iterator[None]:
    """Change the order of claims, kill the group, change a rule, and go back to arrival."""
    service.edit(scheduler={"order": "Deadline"})
    yield
    service.wait_until_settled()
    assert has_argument(service, "deadline")
    [stage] = service.pods("stage")
    where = f"--namespace={service.namespace}"
    service.kubectl("delete", "pod", stage["metadata"]["name"], "--force", "--grace-period=0", where)
    wait_until(lambda: not uids([stage]) & uids(service.pods("stage")), service.describe)
    service.wait_until_settled()
    service.edit(scheduler={"deadline": {"patienceSeconds": 5, "drop": "Never"}})
    yield
    service.wait_until_settled()
    assert has_argument(service, "never")
    service.edit(scheduler={"order": None, "deadline": None})
    yield
    service.wait_until_settled()
    assert not has_argument(service, "deadline")


def has_argument(service: Service, word: str) -> bool:
    """Return whether the only scheduler runs with an argument."""
    [pod] = service.pods("scheduler")
    return word in pod["spec"]["containers"][0]["args"]


def fewer_slots_and_more(service: Service) -> Iterator[None]:
    """Lower the slots while waiting requests need more: the groups with room stay until all have their answers."""
    service.edit(scheduler={"kvSlots": LARGE_SLOTS})
    yield
    service.wait_until_settled()
    wait_until(lambda: ready(service).get("max_total_tokens") == LARGE_SLOTS, service.describe)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, service, LARGE_TOKENS, LARGE_ANSWERS)
        wait_until(lambda: requests(service) >= LARGE_ANSWERS, service.describe)
        service.edit(scheduler={"kvSlots": SMALL_SLOTS})
        yield
        wait_until(
            lambda: answer.done() or service.condition("Ready")[:2] == ("True", "SlotsAreNeeded"), service.describe
        )
        assert answer.result() == (200, LARGE_TOKENS * LARGE_ANSWERS)
    service.wait_until_settled()
    wait_until(lambda: ready(service).get("max_total_tokens") == SMALL_SLOTS, service.describe)
    assert ask(service, LARGE_TOKENS) == (400, 0), "a request that no group can hold was accepted"
    service.edit(scheduler={"kvSlots": LARGE_SLOTS})
    yield
    service.wait_until_settled()
    wait_until(lambda: ready(service).get("max_total_tokens") == LARGE_SLOTS, service.describe)
    assert ask(service, LARGE_TOKENS) == (200, LARGE_TOKENS)


def ready(service: Service) -> Json:
    """Return a gateway's readiness report; nothing if there is no answer."""
    url = service.base_url.removesuffix("/v1") + "/ready"
    try:
        found = httpx.get(url, headers=service.headers, timeout=5)
    except httpx.HTTPError:
        return {}
    return found.json() if found.status_code == 200 else {}


def requests(service: Service) -> int:
    """Return the number of requests that wait or run."""
    found = ready(service)
    return (found.get("waiting") or 0) + (found.get("running") or 0)


def ask(service: Service, tokens: int, answers: int = 1) -> tuple[int, int]:
    """Make a call. Returns: the status and the number of tokens."""
    headers = {**service.headers, "Authorization": f"Bearer {service.api_key()}"}
    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": tokens, "n": answers, "ignore_eos": True}
    found = httpx.post(f"{service.base_url}/completions", json=body, headers=headers, timeout=LARGE_S)
    return found.status_code, found.json()["usage"]["completion_tokens"] if found.status_code == 200 else 0


def gateways(replicas: int) -> Steps:
    def steps(service: Service) -> Iterator[None]:
        service.edit(gateway={"replicas": replicas})
        yield
        wait_until(lambda: len(service.pods("gateway")) == replicas, service.describe, within_s=120)
        service.wait_until_settled()

    return steps


def gateways_anew(service: Service) -> Iterator[None]:
    """Replace every gateway pod, as a new image would."""
    old = uids(service.pods("gateway"))
    service.edit(gateway={"podPatch": made_anew()})
    yield
    wait_until(lambda: not old & uids(service.pods("gateway")), service.describe, within_s=180)
    service.wait_until_settled()


def stages_anew(service: Service) -> Iterator[None]:
    service.edit(worker={"podPatch": made_anew()})
    yield
    service.wait_until_settled()


def made_anew() -> Json:
    """Return a patch that is new every time."""
    return {"metadata": {"annotations": {"made": secrets.token_hex(4)}}}


def images_of(tag: str) -> Steps:
    """Change the images, as a release does. They have the same program, so that the answers must be the same."""

    def steps(service: Service) -> Iterator[None]:
        names = {role: f"{OURS.registry}/orca-{role}" for role in ("gateway", "scheduler", "worker")}
        for node, name in itertools.product(own_layout().nodes, names.values()):
            add_image_name(node, f"{name}:{OURS.tag}", f"{name}:{tag}")
        service.edit(images={role: f"{name}:{tag}" for role, name in names.items()})
        yield
        service.wait_until_settled()
        running = {pod["spec"]["containers"][0]["image"] for role in names for pod in service.pods(PODS_OF[role])}
        assert running == {f"{name}:{tag}" for name in names.values()}

    return steps


def reverted(service: Service) -> Iterator[None]:
    """Revert an edit in the middle of its rollout: the same pods as before serve again."""
    before = uids(service.pods("stage"))
    service.edit(parallelism={"stages": 2})
    wait_until(lambda: len(service.pods("stage")) == 3, service.describe)
    service.edit(parallelism={"stages": 1})
    yield
    service.wait_until_settled()
    assert uids(service.pods("stage")) == before


def three_edits(service: Service) -> Iterator[None]:
    service.edit(parallelism={"stages": 2})
    service.edit(scheduler={"prefetch": 0})
    service.edit(replicas=2, parallelism={"stages": 1})
    yield
    service.wait_until_settled()
    service.edit(replicas=1, scheduler={"prefetch": 1})
    yield
    service.wait_until_settled()


def replaced(service: Service) -> Iterator[None]:
    found = service.get()
    found.pop("status")
    found["metadata"].pop("resourceVersion")  # the operator may write a status in the meantime: no conflict here
    found["spec"]["scheduler"]["maxBatchSize"] = 16
    service.kubectl("replace", "--filename=-", standard_input=json.dumps(found))
    yield
    service.wait_until_settled()


def deleted_and_made_again(service: Service) -> Iterator[None]:
    """Delete and create, like tools that change an immutable field: the children stay and are adopted again."""
    resource = service.get()
    where = f"--namespace={service.namespace}"
    service.kubectl("delete", "orca", service.name, where, "--cascade=orphan")
    service.create(resource["spec"])
    yield
    service.wait_until_settled()


CHANGES = (
    Change("scale 1 to 3", scaled(3), new_pods=4),
    Change("scale 3 to 1", scaled(1), new_pods=0),
    Change("scale 1 to 0 to 1", none_for_a_while, new_pods=2),
    Change("stages 1 to 2", edited(parallelism={"stages": 2}), new_pods=3),
    Change("stages 2 to 1", edited(parallelism={"stages": 1}), new_pods=2),
    Change("tensor 1 to 2", edited(parallelism={"tensor": 2}), new_pods=2),
    Change("tensor 2 to 1", edited(parallelism={"tensor": 1}), new_pods=2),
    Change("batch size 16 to 8", smaller_batch, new_pods=0),
    Change("policy rra and back", round_robin, new_pods=1),
    Change("order deadline and back, group killed", ordered, new_pods=2),
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
                service.kill_operator_after_edit()
        seconds = time.monotonic() - began
    figures: Json = {
        "seconds": round(seconds, 1),
        "operators killed": edits if operator == "dies" else 0,
        "new_pods": len(uids(service.pods()) - before),
        **load.summary(),
    }
    record_figures(f"{change.name}, operator {operator}", figures)
    load.check()
    assert operator == "dies" or change.new_pods in (None, figures["new_pods"]), "pods were restarted for nothing"
