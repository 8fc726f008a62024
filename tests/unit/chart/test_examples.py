"""The examples satisfy the resource's definition, and name nothing that it does not know."""

import re
from typing import Any

import pytest
import yaml
from jsonschema_rs import Draft202012Validator

from support.chart.rendering import CHART, Manifest

DEFINITION = yaml.safe_load((CHART / "crd" / "orcadeployments.yaml").read_text())
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))


def closed(schema: Any) -> Any:
    """The schema with unknown names refused, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_closed = "properties" in schema and schema["properties"] and not isinstance(schema.get("type"), dict)
    return {key: closed(value) for key, value in schema.items()} | (
        {"additionalProperties": False} if is_closed else {}
    )


def validator() -> Draft202012Validator:
    [version] = DEFINITION["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(closed(schema))


def read(name: str) -> Manifest:
    manifest: Manifest = yaml.safe_load((CHART / "examples" / name).read_text())
    return manifest


def test_there_is_an_example_for_each_way_to_run() -> None:
    names = ["deadlines", "external-redis", "http-route", "hub-model", "latency-goal", "multi-stage-gpu"]
    assert [path.stem for path in EXAMPLES] == [*names, "orcadeployment", "round-robin"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_satisfies_the_definition(path: Any) -> None:
    manifest = read(path.name)
    validator().validate(manifest)
    group, names = DEFINITION["spec"]["group"], DEFINITION["spec"]["names"]
    assert (manifest["apiVersion"], manifest["kind"]) == (f"{group}/v1alpha1", names["kind"])


@pytest.mark.parametrize(
    "change",
    [{"replica": 2}, {"replicas": "2"}, {"gateway": {"ingress": {"hosts": "a"}}}],
    ids=["name", "type", "deep"],
)
def test_a_mistake_in_an_example_is_found(change: dict[str, Any]) -> None:
    manifest = read("orcadeployment.yaml")
    manifest["spec"] |= change
    assert not validator().is_valid(manifest)


def test_a_five_line_example_is_enough() -> None:
    assert len((CHART / "examples" / "orcadeployment.yaml").read_text().splitlines()) == 5


def test_the_model_of_the_example_is_in_every_image_that_reads_one() -> None:
    folder = read("orcadeployment.yaml")["spec"]["model"]["uri"].removeprefix("file://").rpartition("/")[0]
    containerfile = (CHART.parents[1] / "services" / "Containerfile").read_text()
    for role in ("gateway", "scheduler", "worker"):
        [target] = re.findall(rf"^FROM \S+ AS {role}\n(.*?)(?=^FROM|\Z)", containerfile, re.MULTILINE | re.DOTALL)
        assert f" {folder}\n" in target
