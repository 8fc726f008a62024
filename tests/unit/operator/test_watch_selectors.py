"""The operator's watches ask the API server only for the objects that it needs."""

import kopf
import pytest

from orca.operator.cluster.watching import CHILDREN, make_settings
from orca.operator.domain import names
from orca.operator.domain.resource import GROUP, PLURAL, VERSION


def selectors(group: str, version: str, plural: str) -> list[str]:
    """Return the label selectors of each list and watch of a kind."""
    watching = make_settings(is_namespaced=False).watching
    return watching.label_selectors.collect(kopf.Resource(group, version, plural))


@pytest.mark.parametrize("kind", CHILDREN, ids=lambda kind: kind[2])
def test_watches_of_child_kinds_select_only_children_of_resources(kind: tuple[str, str, str]) -> None:
    assert selectors(*kind) == [names.DEPLOYMENT_LABEL]


@pytest.mark.parametrize(
    "kind", [(GROUP, VERSION, PLURAL), ("apiextensions.k8s.io", "v1", "customresourcedefinitions")]
)
def test_watches_of_resources_and_their_definition_select_all(kind: tuple[str, str, str]) -> None:
    assert selectors(*kind) == []
