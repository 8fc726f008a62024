"""Small pods for restricted Pod Security, and the objects that lead to them."""

from typing import Any

from cluster.images.scratch import TOOLBOX, UNPRIVILEGED_USER

Json = dict[str, Any]


def pod(namespace: str, name: str, script: str, *, node: str | None = None, claim: str | None = None) -> Json:
    """Return a pod that runs a shell script.

    Args:
        node: the only node for it; None: any.
        claim: of a volume, mounted at /data.
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
    """Return a pod that answers GET / on port 8080, and is ready when it does."""
    made = pod(namespace, name, f"echo {answer} > /tmp/index.html && exec httpd -f -p 8080 -h /tmp", node=node)
    made["spec"]["containers"][0]["readinessProbe"] = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}
    return made


def asking_pod(namespace: str, name: str, host: str, *, node: str) -> Json:
    """Return a pod that prints the first answer to GET / on port 80 of the host, and no failure before it."""
    return pod(namespace, name, f"until fetch http://{host}/ 2>/dev/null; do sleep 0.2; done", node=node)


def service(namespace: str, name: str) -> Json:
    """Return a Service with port 80 for port 8080 of the pods with its name."""
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
