"""The rendered configuration of a cluster: files, manifests, command lines."""

import json
import tomllib
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from cluster.images.scratch import service_images
from cluster.kubernetes.certificates import identities
from cluster.kubernetes.components import control_plane, node_components
from cluster.kubernetes.configuration import PRIVILEGED_NAMESPACES, containerd, write_configuration
from cluster.kubernetes.services import DEPLOYMENTS, manifests
from cluster.machine.errors import ClusterError
from cluster.machine.layout import (
    DNS_ADDRESS,
    INGRESS_ADDRESS,
    NODE_RANGE,
    NODES_MAX,
    POD_RANGE,
    SERVICE_RANGE,
    Layout,
    check_state,
    read_layout,
    write_marker,
)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "state", node_count=2)


def test_addresses_are_in_their_ranges_and_ranges_do_not_overlap(tmp_path: Path) -> None:
    ranges = [ip_network(text) for text in (NODE_RANGE, POD_RANGE, SERVICE_RANGE)]
    nodes = Layout(tmp_path, NODES_MAX).nodes
    assert not any(one.overlaps(other) for one in ranges for other in ranges if one is not other)
    assert all(ip_address(node.address) in ranges[0] for node in nodes)
    assert all(ip_network(node.pod_range).subnet_of(ranges[1]) for node in nodes)
    assert all(ip_address(address) in ranges[2] for address in (DNS_ADDRESS, INGRESS_ADDRESS))


def test_each_file_that_a_command_names_is_written(layout: Layout) -> None:
    layout.state.mkdir()
    write_configuration(layout)
    components = [*control_plane(layout), *(part for node in layout.nodes for part in node_components(layout, node))]
    words = [word.partition("=")[2] for component in components for word in component.command]
    named = [Path(word) for word in words if word.startswith(str(layout.configuration))]
    assert len(named) >= 8
    assert [path for path in named if not path.exists()] == []


def test_each_certificate_that_is_named_is_signed(layout: Layout) -> None:
    layout.state.mkdir()
    write_configuration(layout)
    users = [json.loads(path.read_text())["users"][0]["name"] for path in layout.configuration.glob("*.kubeconfig")]
    assert set(users) <= {identity.file for identity in identities(layout)}


def test_a_node_has_its_own_user_and_may_change_only_itself(layout: Layout) -> None:
    [found] = [identity for identity in identities(layout) if identity.file == "node-1"]
    assert found.subject == "/O=system:nodes/CN=system:node:node-1"


def test_containerd_reads_pod_networks_of_its_node_alone(layout: Layout) -> None:
    settings: dict[str, Any] = tomllib.loads(containerd(layout, layout.nodes[1]))
    cri = settings["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["cni"]["conf_dir"] == str(layout.configuration / "node-1.cni")
    assert cri["restrict_oom_score_adj"] is True


def test_services_of_the_cluster_lie_where_pods_may_have_rights(layout: Layout) -> None:
    deployments = [item for item in manifests(layout) if item["kind"] == "Deployment"]
    found = {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in deployments}
    assert found == set(DEPLOYMENTS)
    assert {namespace for namespace, _ in found} == set(PRIVILEGED_NAMESPACES)


def test_each_service_has_an_image_that_is_put_into_its_node(layout: Layout) -> None:
    deployments = [item for item in manifests(layout) if item["kind"] == "Deployment"]
    wanted = {item["spec"]["template"]["spec"]["containers"][0]["image"] for item in deployments}
    assert wanted == {image.name for image in service_images()}


def test_a_cluster_is_found_again_with_its_nodes(tmp_path: Path) -> None:
    write_marker(Layout(tmp_path, node_count=3))
    assert read_layout(tmp_path).node_count == 3


def test_no_cluster_is_found_where_none_was_started(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no cluster was started below"):
        read_layout(tmp_path)


def test_a_folder_with_something_else_is_not_taken_for_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ClusterError, match="has other files"):
        check_state(Layout(tmp_path))


def test_a_folder_that_nodes_would_not_see_is_refused() -> None:
    with pytest.raises(ClusterError, match="may not be below /var/lib"):
        check_state(Layout(Path("/var/lib/orca")))
