"""Logs of a cluster's pods outlast the cluster."""

from pathlib import Path

from cluster.lifecycle import store_pod_logs
from cluster.machine.layout import Layout


def test_logs_of_pods_are_kept_and_those_of_the_previous_cluster_deleted(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    (layout.logs / "pods").mkdir(parents=True)
    (layout.logs / "pods" / "of-the-one-before.log").touch()
    for node, name in (("node-0", "0.log"), ("node-1", "1.log.20261128-031339")):
        folder = tmp_path / node / "var-log/pods/kube-system_traefik-5d-x_0f1e-2d" / "traefik"
        folder.mkdir(parents=True)
        (folder / name).write_text(node)
    store_pod_logs(layout)
    found = {path.name: path.read_text() for path in (layout.logs / "pods").iterdir()}
    assert found == {
        "kube-system_traefik-5d-x.traefik.0.log": "node-0",
        "kube-system_traefik-5d-x.traefik.1.log.20261128-031339": "node-1",
    }
