"""A change of the model under load: each answer is completely the old model's or the new one's, and no call fails.

The new model is on a volume, like one that was trained further: the same model with every weight a little different,
so that its answers differ.
"""

import time

import pytest

from figures import record_figures
from installation import Service, uids, wait_until
from load import Load
from model_volume import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FOLDER = "/opt/orca/models/orca-austen"
OLD, NEW = f"file://{FOLDER}", "pvc://trained/on"
CLAIM = "trained"
TRAIN_ON = f"""
import pathlib, shutil, torch
from safetensors.torch import load_file, save_file
target = pathlib.Path("/models/on")
shutil.copytree("{FOLDER}", target)
torch.manual_seed(1)
for file in target.glob("*.safetensors"):
    weights = {{name: one * (1 + 0.05 * torch.randn(one.shape)) for name, one in load_file(file).items()}}
    file.chmod(0o644)
    save_file(weights, file)
"""


@pytest.fixture(scope="module")
def both(service: Service, load: Load) -> Load:
    """Return a load that knows the answers of both models; the fixture `load` makes sure that the service answers."""
    write_model(service, CLAIM, TRAIN_ON)
    both = Load(service)
    for uri in (NEW, OLD):
        service.edit(model={"uri": uri})
        service.wait_until_settled()
        both.learn_answers()
    assert all(both.expected[prompt] > load.expected[prompt] for prompt in load.expected), "both say the same"
    return both


@pytest.mark.parametrize(("uri", "operator"), [(NEW, "stays"), (OLD, "dies")])
def test_a_model_is_replaced(service: Service, both: Load, uri: str, operator: str) -> None:
    before = uids(service.pods())
    with both.running():
        began = time.monotonic()
        service.edit(model={"uri": uri})
        if operator == "dies":
            service.kill_operator_after_edit()
        service.wait_until_settled()
        seconds = time.monotonic() - began
    figures = {"seconds": round(seconds, 1), "new_pods": len(uids(service.pods()) - before)}
    record_figures(f"model {uri}, operator {operator}", {**figures, **both.summary()})
    both.check()


def test_a_change_of_model_that_is_taken_back_halfway(service: Service, both: Load) -> None:
    with both.running():
        service.edit(model={"uri": NEW})
        wait_until(lambda: len(service.pods("stage")) == 2, service.describe)
        service.edit(model={"uri": OLD})
        service.wait_until_settled()
    record_figures("model reverted halfway", both.summary())
    both.check()
