"""Changes of a service with an encoder-decoder model, and changes between the two kinds of models, with open streams.

No call fails, and each answer is completely that of a model that was in force during the call. A call that only a
decoder-only model can serve gets its answer, or the refusal of the encoder-decoder model; the other way round, too.
"""

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from cluster.images.loading import add_image_name
from figures import record_figures
from installation import Json, Service, own_layout, uids, wait_until
from load import CALL_S, MODEL, Load, is_answering
from target import OURS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FOLDER = "file:///opt/orca/models"
RESTORE = "orca-restore"
SOURCES = (
    (
        "the letter which lay on the table was from lady susan my dear it began you will be glad to hear that "
        "i am in town again london is very dull in august and i have nobody to talk to but sir james pray "
        "come to me as soon as you can for i have much to tell you and none of it can be written"
    ),
    (
        "she had never been to london but she had read of it in every novel that miss tilney could lend her "
        "is it true she asked that the houses touch the sky henry laughed they touch the smoke he said and "
        "that is as good as a sky to those who live there"
    ),
    (
        "mr knightley looked at her and said nothing for a minute or two then he took up his hat you must do "
        "as you please emma he said at last i never knew you do otherwise but do not ask me to praise it for "
        "i cannot and he walked away across the lawn without once looking back"
    ),
    (
        "it was a fine morning and mr darcy had walked out with his sister have you seen my shawl said mrs "
        "bennet i left it upon the chair and now nobody can tell me where it is elizabeth answered that she "
        "had not"
    ),
)
"""Sources of `orca-restore`, which any model can continue: their targets have about as many tokens as they."""

Spec = dict[str, object]


@dataclass(frozen=True)
class Change:
    """An edit of a service that has an encoder-decoder model."""

    name: str
    spec: Spec
    new_pods: int  # of groups


CHANGES = (
    Change("scale 1 to 3", {"replicas": 3}, new_pods=4),
    Change("scale 3 to 1", {"replicas": 1}, new_pods=0),
    Change("stages 1 to 2", {"parallelism": {"stages": 2}}, new_pods=3),
    Change("stages 2 to 1", {"parallelism": {"stages": 1}}, new_pods=2),
    Change("tensor 1 to 2", {"parallelism": {"tensor": 2}}, new_pods=2),
    Change("tensor 2 to 1", {"parallelism": {"tensor": 1}}, new_pods=2),
)


def model(name: str) -> Json:
    """Return the model of a spec: one of the small models in the images."""
    return {"uri": f"{FOLDER}/{name}"}


@pytest.fixture(scope="module", autouse=True)
def as_before(service: Service, load: Load) -> Iterator[None]:
    """Give the service the model that other scenarios expect, before and after this module."""
    yield
    service.edit(model=model(MODEL), images=None)
    service.wait_until_settled()
    wait_until(lambda: is_answering(load), service.describe)


@pytest.fixture(scope="module")
def both(service: Service, as_before: None) -> Load:  # noqa: ARG001 - the service answers, and is restored
    """Return a load that knows the answers of the models of both kinds."""
    both = Load(service, prompts=SOURCES)
    for name in (RESTORE, MODEL):
        change_model(service, name)
        both.model = name
        both.learn_answers()
    assert all(len(answers) == 2 for answers in both.expected.values()), "both say the same"
    return both


@pytest.fixture
def restoring(service: Service, as_before: None) -> Load:  # noqa: ARG001 - the service answers, and is restored
    """Return a load of a service with the encoder-decoder model."""
    change_model(service, RESTORE)
    return Load(service, prompts=SOURCES, model=RESTORE)


def change_model(service: Service, name: str) -> None:
    service.edit(model=model(name))
    service.wait_until_settled()


@pytest.mark.parametrize("change", CHANGES, ids=[each.name for each in CHANGES])
@pytest.mark.parametrize("operator", ["stays", "dies"])
def test_nobody_notices(service: Service, restoring: Load, change: Change, operator: str) -> None:
    before = pods_of_groups(service)
    with restoring.running():
        began = time.monotonic()
        service.edit(**change.spec)
        if operator == "dies":
            service.kill_operator_after_edit()
        service.wait_until_settled()
        seconds = time.monotonic() - began
    figures: Json = {"seconds": round(seconds, 1), "new_pods": len(pods_of_groups(service) - before)}
    record_figures(f"encoder-decoder: {change.name}, operator {operator}", {**figures, **restoring.summary()})
    restoring.check()
    assert operator == "dies" or change.new_pods == figures["new_pods"], "pods were restarted for nothing"


def pods_of_groups(service: Service) -> set[str]:
    """Return the uids of the pods of groups. Gateways are replaced when the model before is forgotten."""
    return uids([*service.pods("stage"), *service.pods("scheduler")])


@pytest.mark.parametrize(("old", "new"), [(MODEL, RESTORE), (RESTORE, MODEL)])
@pytest.mark.parametrize("operator", ["stays", "dies"])
def test_the_kind_of_the_model_changes(service: Service, both: Load, old: str, new: str, operator: str) -> None:
    change_model(service, old)
    both.model = old  # a name that is known until nobody can ask for an answer of the old model any more
    with both.running(), OwnCalls(service, old).running() as own_calls:
        began = time.monotonic()
        service.edit(model=model(new))
        if operator == "dies":
            service.kill_operator_after_edit()
        service.wait_until_settled()
        seconds = time.monotonic() - began
    figures: Json = {"seconds": round(seconds, 1), "own calls": own_calls.summary()}
    record_figures(f"model {old} to {new}, operator {operator}", {**figures, **both.summary()})
    both.check()
    own_calls.check()


def test_a_change_of_kind_that_is_taken_back_halfway(service: Service, both: Load) -> None:
    change_model(service, MODEL)
    both.model = MODEL
    with both.running():
        service.edit(model=model(RESTORE))
        wait_until(lambda: len(service.pods("stage")) == 2, service.describe)
        service.edit(model=model(MODEL))
        service.wait_until_settled()
    record_figures("change of kind reverted halfway", both.summary())
    both.check()


@pytest.mark.own_cluster
def test_new_images_and_a_model_of_the_other_kind_in_one_edit(service: Service, both: Load) -> None:
    """The images are those of a release, with the same program."""
    change_model(service, MODEL)
    both.model = MODEL
    names = {role: f"{OURS.registry}/orca-{role}" for role in ("gateway", "scheduler", "worker")}
    for node, name in itertools.product(own_layout().nodes, names.values()):
        add_image_name(node, f"{name}:{OURS.tag}", f"{name}:kind")
    with both.running():
        service.edit(model=model(RESTORE), images={role: f"{name}:kind" for role, name in names.items()})
        service.wait_until_settled()
    record_figures("new images and another kind of model", both.summary())
    both.check()


@dataclass
class OwnCalls:
    """Calls with options of one kind of model: echo and log probabilities of the prompt, a chat, or a decoder_prefix.

    The old model answers them. When the new one is in force, they are refused by the field that it does not have, and
    from then on always. Nothing else happens to them.
    """

    service: Service
    model: str
    answers: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    busy: int = 0  # refusals for load

    @property
    def calls(self) -> dict[str, tuple[str, Json, str]]:
        """Path and body of each call, and the beginning of the other model's refusal, by name."""
        common = {"model": self.model, "max_tokens": 8, "temperature": 0}
        prompt = {**common, "prompt": SOURCES[0]}
        if self.model == RESTORE:
            return {"prefix": ("/completions", {**prompt, "decoder_prefix": "The letter"}, "decoder_prefix: ")}
        chat = {**common, "messages": [{"role": "user", "content": SOURCES[0]}]}
        return {
            "echo": ("/completions", {**prompt, "echo": True, "logprobs": 1}, "echo: "),
            "score": ("/completions", {**prompt, "echo": True, "logprobs": 1, "max_tokens": 0}, "echo: "),
            "chat": ("/chat/completions", chat, "messages: this model has no chat template"),
        }

    @contextmanager
    def running(self) -> Iterator["OwnCalls"]:
        """Make the calls again and again until the block ends and each was refused."""
        is_over = threading.Event()
        with ThreadPoolExecutor(len(self.calls)) as threads:
            clients: list[Future[None]] = [threads.submit(self._run, name, is_over) for name in self.calls]
            try:
                self._wait_until_each_has(self.answers)
                yield self
                self._wait_until_each_has(self.refusals)
            finally:
                is_over.set()
        for client in clients:
            client.result()

    def _wait_until_each_has(self, counts: Mapping[str, int]) -> None:
        wait_until(lambda: counts.keys() == self.calls.keys(), lambda: str(self), within_s=CALL_S)

    def summary(self) -> Json:
        return {"answers": self.answers, "refusals": self.refusals, "wrong": len(self.wrong), "busy": self.busy}

    def check(self) -> None:
        assert not self.wrong, f"{len(self.wrong)} wrong, such as {self.wrong[0]}"

    def _run(self, name: str, is_over: threading.Event) -> None:
        path, body, words = self.calls[name]
        headers = {**self.service.headers, "Authorization": f"Bearer {self.service.api_key()}"}
        text: str | None = None
        while not is_over.is_set():
            found = httpx.post(f"{self.service.base_url}{path}", json=body, headers=headers, timeout=CALL_S)
            if found.status_code == 200 and name not in self.refusals:
                choice = found.json()["choices"][0]
                answer = choice["text"] if "text" in choice else choice["message"]["content"]
                text = answer if text is None else text
                self.answers[name] = self.answers.get(name, 0) + 1
                if answer != text:
                    self.wrong.append(f"{name}: {answer!r} and before {text!r}")
            elif found.status_code in (429, 503) and "retry-after" in found.headers:
                self.busy += 1  # any client tries again
            elif found.status_code == 400 and found.json()["error"]["message"].startswith(words):
                self.refusals[name] = self.refusals.get(name, 0) + 1
            else:
                self.wrong.append(f"{name}: {found.status_code} {found.text}")
            time.sleep(0.1)
