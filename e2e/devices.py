"""Devices of a node, which no machine of the tests has: a number that is patched into it, as its plugin would write it.

The cluster's own scheduler assigns them, and the stages compute on the processor.
"""

import json
import secrets

from cluster.kubernetes.kubectl import Kubectl


def new_device() -> str:
    """Return a resource name that no node has: a patch of a node stays after its test."""
    return f"example.com/device-{secrets.token_hex(3)}"


def give_devices(kubectl: Kubectl, device: str, count: int) -> None:
    """Give one node so many devices. Args: device: its resource name."""
    node = kubectl.get("nodes")["items"][-1]["metadata"]["name"]
    patch = [{"op": "add", "path": f"/status/capacity/{device.replace('/', '~1')}", "value": str(count)}]
    kubectl("patch", "node", node, "--subresource=status", "--type=json", f"--patch={json.dumps(patch)}")
