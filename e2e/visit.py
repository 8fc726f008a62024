"""A cluster that is not ours: nothing of Orca is there before, and nothing is left behind."""

import contextlib
import json
from collections.abc import Iterator

from cluster.kubernetes.kubectl import Kubectl
from cluster.machine.errors import ClusterError
from installation import RELEASE, Json, helm, mark_namespace, own_namespaces, target

DEFINITION = "orcadeployments.orca-serving.io"


@contextlib.contextmanager
def visit(kubectl: Kubectl) -> Iterator[None]:
    """Raises: ClusterError where somebody has installed Orca; nothing is changed then."""
    found = kubectl("get", "customresourcedefinition", DEFINITION, "--ignore-not-found", "--output=json")
    check_free(json.loads(found) if found else None)
    mark_namespace(kubectl, target().operator_namespace)
    try:
        yield
    finally:
        leave(kubectl)


def check_free(definition: Json | None) -> None:
    """Args: definition: of the resource, as the cluster has it. Raises: ClusterError where it has one."""
    if definition is None:
        return
    annotations = definition["metadata"].get("annotations") or {}
    name, namespace = (annotations.get(f"meta.helm.sh/release-{what}") for what in ("name", "namespace"))
    whose = f"of release {name} in namespace {namespace}" if name else "of nobody known"
    raise ClusterError(
        f"the cluster has the definition {DEFINITION} already, {whose}: the scenarios install and remove one, which "
        "would end every OrcaDeployment there is, so they leave this cluster alone"
    )


def leave(kubectl: Kubectl) -> None:
    """Take away what this run has made. Raises: ClusterError when somebody uses the definition meanwhile: it stays."""
    operator_namespace = target().operator_namespace
    for name in {each["metadata"]["name"] for each in own_namespaces(kubectl)} - {operator_namespace}:
        kubectl("delete", "namespace", name, "--timeout=180s", within_s=200)
    helm("uninstall", RELEASE, "--namespace", operator_namespace, "--ignore-not-found", "--wait")
    try:
        delete_definition(kubectl)
    finally:
        kubectl("delete", "namespace", operator_namespace, "--timeout=180s", within_s=200)


def delete_definition(kubectl: Kubectl) -> None:
    if not kubectl("get", "customresourcedefinition", DEFINITION, "--ignore-not-found", "--output=name"):
        return
    left = kubectl("get", DEFINITION, "--all-namespaces", "--output=name").split()
    if left:
        raise ClusterError(f"the definition {DEFINITION} stays, as it is used by {', '.join(left)}")
    kubectl("delete", "customresourcedefinition", DEFINITION, "--timeout=60s", within_s=70)
