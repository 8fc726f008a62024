"""Small pods that fit restricted Pod Security, and what leads to them."""

from typing import Any

from cluster.images.scratch import TOOLBOX, UNPRIVILEGED_USER

Json = dict[str, Any]


def pod(namespace: str, name: str, script: str, *, node: str | None = None, claim: str | None = None) -> Json:
    """A pod that runs a shell script.

    Args:
        node: where it must run.
        claim: a volume's, seen at /data.
    """
    container: Json = {
        "name": "main",
        "image": TOOLBOX,
        "command": ["sh", "-c", script],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec: Json = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UNPRIVILEGED_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 0,
        "restartPolicy": "Never",
        "containers": [container],
    }
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    if claim is not None:
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
        spec["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]
    made = _object("v1", "Pod", namespace, name, spec)
    made["metadata"]["labels"] = {"app": name}
    return made


def web_pod(namespace: str, name: str, answer: str, *, node: str | None = None) -> Json:
    """A pod that answers each GET of / on port 8080; it is ready when it does."""
    made = pod(namespace, name, f"echo {answer} > /tmp/index.html && exec httpd -f -p 8080 -h /tmp", node=node)
    made["spec"]["containers"][0]["readinessProbe"] = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}
    return made


def asking_pod(namespace: str, name: str, host: str, *, node: str) -> Json:
    """A pod that writes what a GET of / on port 80 of the host answers, as soon as it answers."""
    return pod(namespace, name, f"until fetch http://{host}/; do sleep 0.2; done", node=node)


def service(namespace: str, name: str) -> Json:
    """Port 80 of the name leads to port 8080 of the pods that are called so."""
    return _object(
        "v1", "Service", namespace, name, {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]}
    )


def ingress(namespace: str, name: str, host: str) -> Json:
    backend = {"service": {"name": name, "port": {"number": 80}}}
    rule = {"host": host, "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}
    return _object("networking.k8s.io/v1", "Ingress", namespace, name, {"rules": [rule]})


def claim(namespace: str, name: str) -> Json:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    return _object("v1", "PersistentVolumeClaim", namespace, name, spec)


def _object(version: str, kind: str, namespace: str, name: str, spec: Json) -> Json:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}
