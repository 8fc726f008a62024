"""The notes that Helm prints at the end: commands that can be copied."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.chart.rendering import CHART, needs_helm, render

pytestmark = needs_helm


@pytest.fixture
def notes(tmp_path: Path) -> Any:
    """Renders NOTES.txt; `helm template` leaves it out, so a copy of the chart has it as a manifest."""

    def rendered(values: dict[str, Any] | None = None) -> str:
        copy = shutil.copytree(CHART, tmp_path / "orca", dirs_exist_ok=True)
        text = (CHART / "templates" / "NOTES.txt").read_text()
        template = f'{{{{ define "notes" }}}}{text}{{{{ end }}}}notes: {{{{ include "notes" . | quote }}}}'
        (copy / "templates" / "notes.yaml").write_text(template)
        [found] = [each["notes"] for each in render(values, chart=copy) if "notes" in each]
        return str(found)

    return rendered


def test_the_resource_to_apply_is_the_five_lines_of_the_example(notes: Any) -> None:
    example = (CHART / "examples" / "orcadeployment.yaml").read_text()
    assert f"<<'EOF'\n{example}EOF\n" in notes()


@pytest.mark.parametrize(
    "command",
    [
        "kubectl wait -n default --for=condition=Ready --timeout=10m orcadeployment/austen",
        "KEY=$(kubectl get -n default secret austen-api-key -o jsonpath='{.data.key}' | base64 -d)",
        "kubectl port-forward -n default service/austen 8000:80 &",
        'curl http://127.0.0.1:8000/v1/completions -H "Authorization: Bearer $KEY"',
    ],
)
def test_the_notes_have_the_next_commands(notes: Any, command: str) -> None:
    assert f"  {command}" in notes()


def test_commands_go_to_a_namespace_that_is_served(notes: Any) -> None:
    text = notes({"namespaces": ["team-a", "team-b"]})
    assert "serves the OrcaDeployments of team-a, team-b." in text
    assert text.count("-n team-a ") == 7
    assert "-n default" not in text


def test_the_notes_ask_for_a_definition_that_is_not_installed(notes: Any) -> None:
    command = "kubectl get crd orcadeployments.orca-serving.io"
    assert command in notes({"crds": {"install": False}})
    assert command not in notes()


def test_the_notes_have_no_trailing_or_doubled_blanks(notes: Any) -> None:
    for text in (notes(), notes({"crds": {"install": False}})):
        assert not [line for line in text.splitlines() if line != line.rstrip()]
        assert "\n\n\n" not in text
