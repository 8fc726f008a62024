"""`python -m cluster COMMAND` (with e2e/ on PYTHONPATH, or run there): see the README beside this file."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.images.building import ROLES, TAG, build_images, image_of
from cluster.images.loading import load
from cluster.images.store import keep
from cluster.kubernetes.status import does_all_run, status_lines
from cluster.lifecycle import check_machine, down, up
from cluster.machine.cache import cache_folder
from cluster.machine.errors import ClusterError
from cluster.machine.layout import NODES_MAX, Layout, Node, found_layout
from cluster.machine.namespaces import entering
from cluster.programs.go_programs import HELM, KUBERNETES, OF_THE_CLUSTER, PROGRAMS, build_programs


def main(argv: Sequence[str]) -> int:
    """Returns: 0 when it was done, 1 with a sentence on standard error when it could not be."""
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
            build_programs([PROGRAMS[name] for name in arguments.names or PROGRAMS], _tell)
        case "images":
            build_images(arguments.roles or ROLES, arguments.tag, _tell)
        case "up":
            up(Layout(state, arguments.nodes), _tell)
        case "down":
            down(Layout(state), keep_logs=arguments.keep_logs)
        case "status":
            layout = found_layout(state)
            print("\n".join(status_lines(layout)))
            return 0 if does_all_run(layout) else 1
        case "kubeconfig":
            print(found_layout(state).kubeconfig)
        case "load":
            _load(found_layout(state), arguments)
        case "keep":
            keep(arguments.images or [image_of(role, TAG) for role in ROLES], _tell)
        case "can-start":
            check_machine(Layout(state))
            if arguments.once_built:
                return 0
            missing = [program.name for program in (*OF_THE_CLUSTER, HELM) if not program.folder.exists()]
            if missing:
                raise ClusterError(f"not in the cache yet: {', '.join(missing)}")
        case "exec":
            _exec(found_layout(state), arguments)
    return 0


def _load(layout: Layout, arguments: argparse.Namespace) -> None:
    nodes = layout.nodes if arguments.node is None else (_node(layout, arguments.node),)
    for image in arguments.images or [image_of(role, TAG) for role in ROLES]:
        load(nodes, image)


def _exec(layout: Layout, arguments: argparse.Namespace) -> None:
    """Does not return: this process becomes the command."""
    enter = entering(_node(layout, arguments.node or 0), mounts=arguments.node is not None)
    environment = dict(os.environ)
    environment["KUBECONFIG"] = str(layout.kubeconfig)
    environment["PATH"] = f"{KUBERNETES.folder}:{HELM.folder}:{os.environ['PATH']}"
    words = [*enter, *arguments.words]
    os.execvpe(words[0], words, environment)


def _node(layout: Layout, number: int) -> Node:
    if number >= layout.node_count:
        raise ClusterError(f"there is no node {number}: the cluster has {layout.node_count}, counted from 0")
    return layout.nodes[number]


def _tell(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    default = cache_folder() / "cluster"
    parser.add_argument("--state", type=Path, default=default, help="the cluster's folder (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("binaries", help="build the programs that are not in the cache yet")
    add.add_argument("names", nargs="*", choices=[[], *PROGRAMS], metavar="NAME", help=f"of {', '.join(PROGRAMS)}")
    add = commands.add_parser("images", help="build Orca's images from this checkout")
    add.add_argument("roles", nargs="*", choices=[[], *ROLES], metavar="ROLE", help=f"of {', '.join(ROLES)}; else all")
    add.add_argument("--tag", default=TAG, help="of all images (default: %(default)s)")
    add = commands.add_parser("up", help="start a cluster and wait until it is ready")
    add.add_argument("--nodes", type=int, choices=range(1, NODES_MAX + 1), default=2, help="1 to 9, 2 unless said")
    add = commands.add_parser("down", help="end it and remove all that is left of it")
    add.add_argument(
        "--keep-logs", action="store_true", help="the audit log, the components' and those of pods stay in its folder"
    )
    commands.add_parser("status", help="which components run; 1 when one does not")
    commands.add_parser("kubeconfig", help="the administrator's file, for what runs inside the cluster's network")
    add = commands.add_parser("can-start", help="0 when a cluster could be up within a minute")
    add.add_argument("--once-built", action="store_true", help="0 also when there is something to build first")
    add = commands.add_parser("load", help="put images of docker's or buildah's store into the nodes")
    add.add_argument("images", nargs="*", metavar="IMAGE", help="without any, those that `images` builds")
    add.add_argument("--node", type=int, help="only into this one")
    add = commands.add_parser("keep", help="put images of docker's or buildah's store into what new nodes begin with")
    add.add_argument("images", nargs="*", metavar="IMAGE", help="without any, those that `images` builds")
    add = commands.add_parser("exec", help="run a command in the cluster's network, with kubectl and helm at hand")
    add.add_argument("--node", type=int, help="on this node, with its folders; otherwise on node 0 with the machine's")
    add.add_argument("words", nargs="+", metavar="-- CMD")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
