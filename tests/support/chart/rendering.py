"""The chart as Helm renders it. Without Helm the tests that need it are skipped."""

import functools
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.programs.go_programs import HELM as BUILT

CHART = Path(__file__).parents[3] / "charts" / "orca"
Manifest = dict[str, Any]


HELM = shutil.which("helm") or (str(BUILT.path) if BUILT.path.exists() else None)
needs_helm = pytest.mark.skipif(
    HELM is None, reason="helm is not on the PATH; `python -m cluster binaries helm`, in e2e/, builds it in a minute"
)

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not on the PATH (Debian's package prometheus)"
)


class Refused(Exception):
    """Helm refused to render; the message is Helm's."""


def render(values: Mapping[str, Any] | None = None, *, chart: Path = CHART, release: str = "orca") -> list[Manifest]:
    """All manifests, of a release in the namespace `system`. Raises: Refused."""
    return [each for each in yaml.safe_load_all(_render(json.dumps(values or {}), chart, release)) if each]


@functools.cache
def _render(values: str, chart: Path, release: str) -> str:
    assert HELM is not None
    # A Helm that was built without its release's stamps takes itself for one of Kubernetes 1.20.
    where = ["--namespace", "system", "--kube-version", "1.34.0", "--values", "-"]
    done = subprocess.run(
        [HELM, "template", release, str(chart), *where], input=values, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


def the(kind: str, values: Mapping[str, Any] | None = None) -> Manifest:
    """The one manifest of its kind."""
    [manifest] = [each for each in render(values) if each["kind"] == kind]
    return manifest


def kinds(values: Mapping[str, Any] | None = None) -> list[str]:
    """Return the kinds of all rendered objects."""
    return sorted(each["kind"] for each in render(values))


EVERYTHING = {
    "networkPolicies": {"deployments": True, "operator": True, "metricsNamespaces": ["monitoring"]},
    "monitoring": {
        "labels": {"release": "prometheus"},
        "serviceMonitor": True,
        "podMonitor": True,
        "rules": {"enabled": True},
        "dashboard": {"enabled": True},
    },
}
"""Every switch on."""
