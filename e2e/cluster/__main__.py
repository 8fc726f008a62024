"""`python -m cluster COMMAND`, with e2e/ on PYTHONPATH or as the working directory: see README.md in this folder."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.images.building import ROLES, TAG, build_images, orca_image
from cluster.images.loading import load
from cluster.images.store import keep
from cluster.kubernetes.status import all_components_run, status_lines
from cluster.lifecycle import check_machine, down, up
from cluster.machine.cache import cache_folder
from cluster.machine.errors import ClusterError
from cluster.machine.layout import NODES_MAX, Layout, Node, read_layout
from cluster.machine.namespaces import enter_command
from cluster.programs.go_programs import CLUSTER_PROGRAMS, HELM, KUBERNETES, PROGRAMS, build_programs


def main(argv: Sequence[str]) -> int:
    """Run one command. Returns: 0 after success, 1 after a failure, with the reason on standard error."""
    arguments = _parser().parse_args(list(argv))
    try:
        return _do(arguments)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def _do(arguments: argparse.Namespace) -> int:
    state: Path = arguments.state.absolute()
    match arguments.command:
        case "binaries":
            build_programs([PROGRAMS[name] for name in arguments.names or PROGRAMS], _print_line)
        case "images":
            build_images(arguments.roles or ROLES, arguments.tag, _print_line)
        case "up":
            up(Layout(state, arguments.nodes), _print_line)
        case "down":
            down(Layout(state), keep_logs=arguments.keep_logs)
        case "status":
            layout = read_layout(state)
            print("\n".join(status_lines(layout)))
            return 0 if all_components_run(layout) else 1
        case "kubeconfig":
            print(read_layout(state).kubeconfig)
        case "load":
            _load(read_layout(state), arguments)
        case "keep":
            keep(arguments.images or [orca_image(role, TAG) for role in ROLES], _print_line)
        case "can-start":
            check_machine(Layout(state))
            if arguments.once_built:
                return 0
            missing = [program.name for program in (*CLUSTER_PROGRAMS, HELM) if not program.folder.exists()]
            if missing:
                raise ClusterError(f"not in the cache yet: {', '.join(missing)}")
        case "exec":
            _exec(read_layout(state), arguments)
    return 0


def _load(layout: Layout, arguments: argparse.Namespace) -> None:
    nodes = layout.nodes if arguments.node is None else (_node(layout, arguments.node),)
    for image in arguments.images or [orca_image(role, TAG) for role in ROLES]:
        load(nodes, image)


def _exec(layout: Layout, arguments: argparse.Namespace) -> None:
    """Replace this process by the command; do not return."""
    enter = enter_command(_node(layout, arguments.node or 0), mounts=arguments.node is not None)
    environment = dict(os.environ)
    environment["KUBECONFIG"] = str(layout.kubeconfig)
    environment["PATH"] = f"{KUBERNETES.folder}:{HELM.folder}:{os.environ['PATH']}"
    words = [*enter, *arguments.words]
    os.execvpe(words[0], words, environment)


def _node(layout: Layout, number: int) -> Node:
    if number >= layout.node_count:
        raise ClusterError(f"there is no node {number}: the cluster has {layout.node_count} nodes, counted from 0")
    return layout.nodes[number]


def _print_line(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    default = cache_folder() / "cluster"
    parser.add_argument("--state", type=Path, default=default, help="the cluster's folder (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("binaries", help="build the programs that are not in the cache yet")
    programs = f"programs to build, of {', '.join(PROGRAMS)} (all)"
    add.add_argument("names", nargs="*", choices=[[], *PROGRAMS], metavar="NAME", help=programs)
    add = commands.add_parser("images", help="build Orca's images from this checkout")
    roles = f"roles to build, of {', '.join(ROLES)} (all)"
    add.add_argument("roles", nargs="*", choices=[[], *ROLES], metavar="ROLE", help=roles)
    add.add_argument("--tag", default=TAG, help="tag of all images (default: %(default)s)")
    add = commands.add_parser("up", help="start a cluster and wait until it is ready")
    nodes = "number of nodes, 1 to 9 (default: %(default)s)"
    add.add_argument("--nodes", type=int, choices=range(1, NODES_MAX + 1), default=2, help=nodes)
    add = commands.add_parser("down", help="end the cluster and remove everything that is left of it")
    add.add_argument(
        "--keep-logs", action="store_true", help="keep the audit log and the logs of components and pods in its folder"
    )
    commands.add_parser("status", help="print which components run; the exit code is 1 if one does not")
    commands.add_parser("kubeconfig", help="print the administrator's kubeconfig, for use in the cluster's network")
    add = commands.add_parser("can-start", help="the exit code is 0 if a cluster can start within a minute")
    add.add_argument("--once-built", action="store_true", help="exit code 0 even if programs must be built first")
    add = commands.add_parser("load", help="copy images from docker or buildah into the nodes")
    add.add_argument("images", nargs="*", metavar="IMAGE", help="images to copy (those that `images` builds)")
    add.add_argument("--node", type=int, help="copy only into this node")
    add = commands.add_parser("keep", help="copy images from docker or buildah into the store for new nodes")
    add.add_argument("images", nargs="*", metavar="IMAGE", help="images to copy (those that `images` builds)")
    add = commands.add_parser("exec", help="run a command in the cluster's network, with kubectl and helm on the PATH")
    add.add_argument("--node", type=int, help="node for the command, with its folders (node 0, with this machine's)")
    add.add_argument("words", nargs="+", metavar="-- CMD")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
