"""A model is fetched into the cluster once, from an S3 store, and a start without it has a reason."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.kubernetes.kubectl import Kubectl
from cluster.machine.layout import Layout
from cluster.programs.go_programs import VERSITYGW
from figures import record_figures
from installation import ROOT, Json, Service, install_chart, wait_until
from object_store import BUCKET, KEYS, ObjectStore, running_store

pytestmark = [pytest.mark.e2e, pytest.mark.own_cluster, pytest.mark.timeout(600)]

SMALL_MODEL = ROOT / "services/orca/cli/small_model/orca-austen"
PATH = "austen/1"


@pytest.fixture
def store(layout: Layout, tmp_path: Path) -> Iterator[ObjectStore]:
    if not VERSITYGW.path.exists():
        pytest.skip(
            "there is no S3 store here: `python -m cluster binaries` builds versitygw into the cache in a minute"
        )
    with running_store(tmp_path, layout.first_node.address) as store:
        store.put_folder(SMALL_MODEL, PATH)
        yield store


@pytest.fixture
def service(kubectl: Kubectl, namespace: str) -> Service:
    install_chart()
    return Service(kubectl, namespace)


def write_keys(service: Service, keys: dict[str, str]) -> None:
    """Write the Secret that the resource names."""
    metadata = {"name": "store", "namespace": service.namespace}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys}
    service.kubectl("apply", "--filename=-", standard_input=json.dumps(secret))


def spec(store: ObjectStore, path: str = PATH) -> Json:
    model = {
        "uri": f"s3://{BUCKET}/{path}",
        "servedName": "austen",
        "endpoint": store.url,
        "tokenSecret": {"name": "store"},
        "cache": {"sizeGiB": 1},
    }
    return {"model": model, "worker": {"threads": 1}}


def claims_of_models(service: Service) -> list[str]:
    selector = "--selector=orca-serving.io/role=fetch"
    found = service.kubectl(
        "get", "persistentvolumeclaims", f"--namespace={service.namespace}", selector, "--output=name"
    )
    return found.split()


def jobs(service: Service) -> list[Json]:
    found: list[Json] = service.kubectl.get("jobs", f"--namespace={service.namespace}")["items"]
    return found


def test_a_model_is_fetched_once_for_all_that_read_it(service: Service, store: ObjectStore) -> None:
    write_keys(service, KEYS)
    service.create({**spec(store), "replicas": 2})
    fetched_s = service.wait_for("ModelReady", "True", "Fetched")
    ready_s = service.wait_for("Ready", "True", "Serving")
    record_figures("seconds of a fetch of 5.6 MB", {"fetched": round(fetched_s, 1), "then ready": round(ready_s, 1)})
    assert len(service.pods("stage")) == 2
    [job] = jobs(service)
    assert job["status"]["succeeded"] == 1
    assert len(service.pods("fetch")) == 1


def test_a_path_without_a_model_and_wrong_keys_are_told_and_mended(service: Service, store: ObjectStore) -> None:
    write_keys(service, {**KEYS, "secretAccessKey": "another"})
    service.create({**spec(store), "deletionPolicy": "Delete"})
    seconds = {"denied": service.wait_for("ModelReady", "False", "ModelDenied")}
    write_keys(service, KEYS)
    service.edit(**spec(store, "austen/2"))
    seconds["missing"] = service.wait_for("ModelReady", "False", "ModelMissing")
    service.edit(**spec(store))
    seconds["mended"] = service.wait_for("ModelReady", "True", "Fetched")
    service.wait_for("Ready", "True", "Serving")
    wait_until(lambda: len(claims_of_models(service)) == 1, lambda: str(claims_of_models(service)))
    record_figures("seconds until a refused fetch is told", {what: round(took, 1) for what, took in seconds.items()})


def test_suspended_with_a_model_that_is_not_there_nothing_runs(service: Service, store: ObjectStore) -> None:
    write_keys(service, KEYS)
    service.create({**spec(store), "replicas": 0})
    service.wait_for("Ready", "True", "Holding")
    service.edit(suspend=True, model={"uri": f"s3://{BUCKET}/austen/none"})
    wait_until(lambda: not service.pods("gateway"), service.describe)
    service.edit(suspend=False, model={"uri": f"s3://{BUCKET}/{PATH}"})
    service.wait_for("Ready", "True", "Holding")
