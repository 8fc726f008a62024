"""A model that a pod of the worker's image writes to a volume: for scenarios with models that no image has."""

from installation import Json, Service, target


def write_model(service: Service, claim: str, script: str) -> None:
    """Make a volume in the service's namespace, and run a script that writes models into it.

    Args: claim: name of the volume, at `/models` in the pod. script: Python, with torch and safetensors.
    """
    where, pod = f"--namespace={service.namespace}", f"pod/write-{claim}"
    volume = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    service.kubectl.apply(
        [
            _manifest(service, "PersistentVolumeClaim", claim, volume),
            _manifest(service, "Pod", f"write-{claim}", _pod(claim, script)),
        ]
    )
    service.kubectl("wait", pod, where, "--for=jsonpath={.status.phase}=Succeeded", "--timeout=300s", within_s=310)
    service.kubectl("delete", pod, where)


def _pod(claim: str, script: str) -> Json:
    nobody = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "write",
        "image": f"{target().registry}/orca-worker:{target().tag}",
        "imagePullPolicy": "IfNotPresent",
        "command": ["/opt/libraries/bin/python", "-c", script],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": claim}}
    return {"restartPolicy": "Never", "securityContext": nobody, "containers": [container], "volumes": [volume]}


def _manifest(service: Service, kind: str, name: str, spec: Json) -> Json:
    metadata = {"name": name, "namespace": service.namespace}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec}
