"""Every field of the resource: a valid value, its edges, invalid ones, and back. It is reached, or refused when it is
written, and never accepted only to be stuck.

What the real API server accepts is rendered by the operator's pure code, and each manifest that comes of it is offered
to the same API server.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from cluster.programs import gateway_api
from orca.operator.domain.resource import Json, OrcaDeployment, read
from support.operator.api_server import api_server, install_crd
from support.operator.clusters import FakeCluster
from support.operator.dry_run import DryRun, dry_run
from support.operator.fields import Field, fields, invalid, records, valid
from support.operator.parts import complaint

NAMESPACE = "fields"
DECIDES = frozenset(
    {"rollout.maxSurge", "rollout.maxUnavailable", "startupSeconds", "gateway.ingress.waitForAddress", "slo.replan"}
)
"""Fields that no manifest shows: they decide which group comes or goes next (test_rollout.py), when it is ready, and
what becomes of a better plan (test_plan_following.py)."""
NEEDS_MORE = frozenset({"worker.hostNetwork"})
"""Fields with which pods do not keep to the restricted Pod Security level."""
WRITTEN = ("name", "namespace", "labels", "annotations", "ownerReferences")
ROUNDS = 8
"""More than a resource with one group needs; a thousand groups come one in each round."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def api(programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DryRun]:
    """Start dry runs against an API server. It knows HTTPRoutes if their definition is in the cache. Its namespace
    warns of pods beyond the restricted level.
    """
    with api_server(programs, tmp_path_factory.mktemp("fields")) as server:
        install_crd(server)
        for file in gateway_api.folder().glob("*_httproutes.yaml"):
            install_crd(server, file)
        level = {f"pod-security.kubernetes.io/{how}": "restricted" for how in ("enforce", "warn")}
        client.CoreV1Api(server.api()).create_namespace({"metadata": {"name": NAMESPACE, "labels": level}})
        with dry_run(server, NAMESPACE) as asked:
            yield asked


def named(field: Field) -> str:
    return field.name


@pytest.mark.parametrize("field", fields(), ids=named)
def test_every_accepted_value_takes_effect_and_can_be_reverted(api: DryRun, field: Field) -> None:
    start = accepted(api, field.base)
    for value in valid(field):
        story = f"{field.name}: {value!r} is accepted"
        deployment = accepted(api, field.spec(value))
        manifests = rendered(deployment)
        decides = field.name in DECIDES and deployment.spec != start.spec
        assert decides or manifests != rendered(start), f"{story}, and makes no difference"
        for manifest in manifests:
            assert not complaint(manifest), f"{story}; then {complaint(manifest)}"
            said = api.apply(manifest)
            if said.status == 404 and manifest["kind"] == "HTTPRoute":
                continue
            assert said.is_yes, f"{story}; then {manifest['kind']}: {said}"
            assert field.name in NEEDS_MORE or not said.warnings, f"{story}; then {manifest['kind']}: {said}"
    assert rendered(accepted(api, field.base)) == rendered(start)


@pytest.mark.parametrize("field", fields(), ids=named)
def test_invalid_values_are_refused_on_write(api: DryRun, field: Field) -> None:
    for value in invalid(field):
        said = api.create(field.spec(value))
        assert not said.is_yes, f"{field.name}: {value!r} is accepted"
        assert said.status in (400, 422), said


@pytest.mark.parametrize("record", records(), ids=named)
def test_an_unknown_field_is_refused(api: DryRun, record: Field) -> None:
    said = api.create(Field((*record.path, "unheard"), {}).spec(1))
    assert not said.is_yes, f"{record.name}.unheard is accepted"
    assert f"{record.name.replace('[]', '[0]')}.unheard" in said.body["message"], said


def accepted(api: DryRun, spec: Json) -> OrcaDeployment:
    """Return the accepted resource as the operator reads it."""
    said = api.create(spec)
    assert said.is_yes, f"{spec}: {said}"
    # The API server draws a uid for each try.
    return read({**said.body, "metadata": {**said.body["metadata"], "uid": "uid-1"}})


def rendered(deployment: OrcaDeployment) -> list[Json]:
    """All manifests once there is nothing to add, or after some rounds."""
    cluster = FakeCluster(deployment)
    for _ in range(ROUNDS):
        if not cluster.reconcile().actions:
            break
        cluster.start()
    objects = [value for (kind, _), value in sorted(cluster.objects.items()) if kind != "Pod"]
    return [_as_written(each) for each in objects]


def _as_written(manifest: Json) -> Json:
    """Return the manifests without the fields that the cluster adds."""
    metadata = {key: manifest["metadata"][key] for key in WRITTEN if key in manifest["metadata"]}
    return {key: value for key, value in {**manifest, "metadata": metadata}.items() if key != "status"}
