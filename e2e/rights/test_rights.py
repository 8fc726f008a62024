"""The operator's use of its rights, from the API server's audit log of all scenarios before this one.

This scenario runs last (conftest): without the others it would find unused rights.
"""

import json
from collections.abc import Iterator

import pytest

from cluster.kubernetes.kubectl import Kubectl
from cluster.machine.layout import Layout
from figures import record_figures
from installation import Json
from target import OURS

pytestmark = [pytest.mark.e2e, pytest.mark.own_cluster]

OPERATOR = f"system:serviceaccount:{OURS.operator_namespace}:orca-operator"
FORBIDDEN = 403

Right = tuple[str, str, str]
"""API group, resource, verb."""


def test_every_right_is_used_and_nothing_else_is_asked_for(kubectl: Kubectl, layout: Layout) -> None:
    given = set(granted(kubectl))
    asked, refused = calls(layout)
    record_figures("rights", {"granted": len(given), "used": len(given & asked), "calls by": len(asked)})
    assert not {right for right in given if "*" in right}
    # An operator that is being uninstalled is refused its granted rights.
    assert not refused - given, f"asked for and refused: {sorted(refused - given)}"
    assert not given - asked, f"granted and never used: {sorted(given - asked)}"


def granted(kubectl: Kubectl) -> Iterator[Right]:
    lease_role = kubectl.get("role", "orca-operator-lease", f"--namespace={OURS.operator_namespace}")
    for rule in kubectl.get("clusterrole", "orca-operator")["rules"] + lease_role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    yield group, resource, verb


def calls(layout: Layout) -> tuple[set[Right], set[Right]]:
    """Return the rights that the operator's calls needed, and those that it was refused."""
    used, refused = set(), set()
    for event in events(layout):
        of = event["objectRef"]
        resource = "/".join(filter(None, (of["resource"], of.get("subresource"))))
        code = event["responseStatus"].get("code")
        right = (of.get("apiGroup", ""), resource, event["verb"])
        used.add(right)
        if event["verb"] == "patch" and code == 201:
            used.add((*right[:2], "create"))  # a server-side apply of a new object needs both
        # A namespace that is being deleted refuses calls, too, regardless of rights.
        if code == FORBIDDEN and "because it is being terminated" not in event["responseStatus"].get("message", ""):
            refused.add(right)
    return used, refused


def events(layout: Layout) -> Iterator[Json]:
    """Yield the operator's calls on resources."""
    with layout.audit_log.open() as log:
        for line in log:
            event = json.loads(line)
            if event["user"].get("username") == OPERATOR and event.get("objectRef", {}).get("resource"):
                yield event
