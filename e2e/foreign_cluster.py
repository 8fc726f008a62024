"""A foreign cluster: it must have nothing of Orca before, and has nothing left afterwards."""

import contextlib
import json
from collections.abc import Iterator

from cluster.kubernetes.kubectl import Kubectl
from cluster.machine.errors import ClusterError
from installation import RELEASE, Json, helm, mark_namespace, own_namespaces, target

DEFINITION = "orcadeployments.orca-serving.io"


@contextlib.contextmanager
def use_foreign_cluster(kubectl: Kubectl) -> Iterator[None]:
    """Prepare a foreign cluster, and clean up at the end. Raises: ClusterError if Orca is installed there already."""
    found = kubectl("get", "customresourcedefinition", DEFINITION, "--ignore-not-found", "--output=json")
    check_not_installed(json.loads(found) if found else None)
    mark_namespace(kubectl, target().operator_namespace)
    try:
        yield
    finally:
        clean_up(kubectl)


def check_not_installed(definition: Json | None) -> None:
    """Check that the cluster has no definition of the resource. Raises: ClusterError if it has one."""
    if definition is None:
        return
    annotations = definition["metadata"].get("annotations") or {}
    name, namespace = (annotations.get(f"meta.helm.sh/release-{what}") for what in ("name", "namespace"))
    owner = f"of release {name} in namespace {namespace}" if name else "of an unknown owner"
    raise ClusterError(
        f"the cluster already has the definition {DEFINITION}, {owner}. The scenarios install and remove one, which "
        "would end every existing OrcaDeployment, so they do not run on this cluster"
    )


def clean_up(kubectl: Kubectl) -> None:
    """Remove everything that this run has made. Raises: ClusterError if others use the definition, which stays then."""
    operator_namespace = target().operator_namespace
    for name in {each["metadata"]["name"] for each in own_namespaces(kubectl)} - {operator_namespace}:
        kubectl("delete", "namespace", name, "--timeout=180s", within_s=200)
    helm("uninstall", RELEASE, "--namespace", operator_namespace, "--ignore-not-found", "--wait")
    try:
        delete_definition(kubectl)
    finally:
        kubectl("delete", "namespace", operator_namespace, "--timeout=180s", within_s=200)


def delete_definition(kubectl: Kubectl) -> None:
    """Delete the definition. Raises: ClusterError if a resource uses it."""
    if not kubectl("get", "customresourcedefinition", DEFINITION, "--ignore-not-found", "--output=name"):
        return
    left = kubectl("get", DEFINITION, "--all-namespaces", "--output=name").split()
    if left:
        raise ClusterError(f"the definition {DEFINITION} stays, because it is used by {', '.join(left)}")
    kubectl("delete", "customresourcedefinition", DEFINITION, "--timeout=60s", within_s=70)
