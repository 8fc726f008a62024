"""Manifests of some OrcaDeployments as an earlier release rendered them, stored to compare with.

An upgrade of the operator must not change what it renders for a spec that has not changed: another pod template would
replace pods. If a change of the manifests is intended, write the file again, and read its difference:

    PYTHONPATH=tests python -m support.operator.stored_renderings
"""

import json
from collections.abc import Mapping
from pathlib import Path

from orca.operator.domain.actions import Apply
from orca.operator.domain.resource import Json
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment

FILE = Path(__file__).with_suffix(".json")

SPECS: Mapping[str, Json] = {
    "default": {},
    "with many fields": {
        "model": {"uri": "hf://org/model", "dtype": "bfloat16", "maxModelLen": 4096, "servedName": "m"},
        "parallelism": {"stages": 2, "tensor": 2},
        "worker": {"device": "cuda", "resources": {"limits": {"memory": "8Gi"}}, "nodeSelector": {"gpu": "h100"}},
        "scheduler": {"policy": "request_level", "maxBatchSize": 32, "kvSlots": 4096, "prefetch": 0},
        "gateway": {"replicas": 2, "ingress": {"host": "a.example"}},
        "pool": {"external": {"urlSecret": {"name": "redis"}}},
        "metricNames": ["orca", "vllm"],
    },
}
"""Specs by name."""


def rendered(name: str) -> Json:
    """Return everything that the operator writes until the cluster is as a spec says, by kind and name.

    A Secret is left out: it has random keys.
    """
    cluster = FakeCluster(deployment(**SPECS[name]))
    written = [action.manifest for plan in cluster.settle() for action in plan.actions if isinstance(action, Apply)]
    found = {f"{each['kind']} {each['metadata']['name']}": each for each in written}
    return {key: manifest for key, manifest in sorted(found.items()) if manifest["kind"] != "Secret"}


def as_text(manifest: Json) -> str:
    return json.dumps(manifest, indent=1)


def stored() -> Json:
    """Return the stored manifests, by name of their spec, then by kind and name."""
    found: Json = json.loads(FILE.read_text())
    return found


if __name__ == "__main__":
    FILE.write_text(as_text({name: rendered(name) for name in SPECS}) + "\n")
