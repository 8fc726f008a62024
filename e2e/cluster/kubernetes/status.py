"""The state of a cluster's components: `python -m cluster status`."""

from cluster.kubernetes.components import Component, container_runtime, control_plane, is_running, node_components
from cluster.machine.layout import Layout


def status_lines(layout: Layout) -> list[str]:
    """Return a line for each component of each node: `runs` or `does not run`."""
    return [
        f"{component.cgroup:32} {'runs' if is_running(component) else 'does not run'}" for component in _all(layout)
    ]


def all_components_run(layout: Layout) -> bool:
    return all(is_running(component) for component in _all(layout))


def _all(layout: Layout) -> list[Component]:
    of_nodes = [
        component
        for node in layout.nodes
        for component in (container_runtime(layout, node), *node_components(layout, node))
    ]
    return [*control_plane(layout), *of_nodes]
