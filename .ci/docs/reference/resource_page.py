"""The page of the resource OrcaDeployment, from its definition in the chart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from reference.tables import code, sentence, table

DEFINITION = Path(__file__).parents[3] / "charts" / "orca" / "crd" / "orcadeployments.yaml"
Json = dict[str, Any]

_HEAD = """# OrcaDeployment

The resource describes one served model. `kubectl explain orca.spec --recursive` prints the same. The last words
of a description say what a change replaces: groups, gateways, schedulers, the pool, or nothing ("Live": it takes effect
while everything runs).

"""


def page() -> str:
    definition = yaml.safe_load(DEFINITION.read_text())
    [version] = definition["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    names = definition["spec"]["names"]
    api = f"{definition['spec']['group']}/{version['name']}"
    parts = [
        _HEAD,
        f"`apiVersion: {api}`, `kind: {names['kind']}`; short name: `{names['shortNames'][0]}`.\n\n",
        "## spec\n\n",
    ]
    spec = schema["properties"]["spec"]
    plain = {name: of for name, of in spec["properties"].items() if "properties" not in of}
    parts += [table(["Field", "Type", "Meaning"], _rows(plain, "", set(spec.get("required", ()))))]
    for name, of in spec["properties"].items():
        if "properties" in of:
            parts.append(f"## spec.{name}\n\n{sentence(of.get('description', ''))}\n\n")
            parts.append(table(["Field", "Type", "Meaning"], _rows(of["properties"], "", set(of.get("required", ())))))
            parts.append(_rules(of))
    parts.append(_rules(spec, "## Rules across fields\n\n"))
    status = schema["properties"]["status"]
    parts.append("## status\n\n" + table(["Field", "Type", "Meaning"], _rows(status.get("properties", {}), "", set())))
    columns = [(column["name"], code(column["jsonPath"])) for column in version["additionalPrinterColumns"]]
    parts.append("## Columns of kubectl get\n\n" + table(["Column", "From"], columns))
    return "".join(parts)


def _rows(properties: Json, path: str, required: set[str]) -> Iterator[tuple[str, str, str]]:
    for name, of in properties.items():
        items = of.get("items", {}) if of.get("type") == "array" else {}
        place = f"{path}{name}"
        yield code(place), _type(of, is_required=name in required), sentence(of.get("description", ""))
        inner, suffix = (items, "[]") if "properties" in items else (of, "")
        yield from _rows(inner.get("properties", {}), f"{place}{suffix}.", set(inner.get("required", ())))


def _type(of: Json, *, is_required: bool) -> str:
    """Return type, default and range, a line each."""
    kind = of.get("type", "integer or string" if of.get("x-kubernetes-int-or-string") else "any")
    if kind == "array" and of.get("items", {}).get("type"):
        kind = f"list of {of['items']['type']}s"
    lines = [f"{kind}, required" if is_required else kind]
    if "enum" in of:
        lines = [f"one of {', '.join(code(value) for value in of['enum'])}" + (", required" if is_required else "")]
    if of.get("default") not in (None, {}):
        lines.append(f"default {code(_shown(of['default']))}")
    least, most = of.get("minimum"), of.get("maximum")
    if least is not None or most is not None:
        lines.append(
            f"{least} to {most}"
            if None not in (least, most)
            else f"at least {least}"
            if most is None
            else f"at most {most}"
        )
    if "maxLength" in of:
        lines.append(f"at most {of['maxLength']} characters")
    return "\n".join(lines)


def _shown(value: object) -> object:
    """Return a default as YAML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(each)}" for name, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else value


def _rules(of: Json, head: str = "") -> str:
    messages = [sentence(rule["message"]) for rule in of.get("x-kubernetes-validations", ()) if "message" in rule]
    return head + "".join(f"- {message}\n" for message in messages) + "\n" if messages else ""
