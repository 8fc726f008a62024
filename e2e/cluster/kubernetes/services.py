"""The cluster's own services as manifests (pure): DNS, Ingress, and volumes for claims.

All of them run on the first node, so that tests may lose the others.
"""

import json
from typing import Any

from cluster.images.scratch import TOOLBOX, UNPRIVILEGED_USER, image_name
from cluster.machine.layout import DNS_ADDRESS, DNS_DOMAIN, INGRESS_ADDRESS, Layout
from cluster.programs.go_programs import COREDNS, LOCAL_PATH, TRAEFIK

Json = dict[str, Any]

SYSTEM_NAMESPACE = "kube-system"
VOLUMES_NAMESPACE = "local-path-storage"
DEPLOYMENTS = ((SYSTEM_NAMESPACE, "coredns"), (SYSTEM_NAMESPACE, "traefik"), (VOLUMES_NAMESPACE, "local-path"))
"""Namespace and name of each Deployment in this module; the cluster is up when all are available."""

INGRESS_PORT = 8080
"""Port of Traefik in its pod, and so of a Gateway's listener; its Service has port 80."""

_GATEWAY_API = "gateway.networking.k8s.io"
_ROUTING = "gatewayclasses gateways httproutes grpcroutes referencegrants backendtlspolicies"
_COREFILE = f"""\
.:53 {{
    errors
    health
    ready
    kubernetes {DNS_DOMAIN} in-addr.arpa ip6.arpa {{
        ttl 5
    }}
    cache 5
    reload
}}
"""
_SETUP = '#!/bin/sh\nset -eu\nmkdir -m 0777 -p "$VOL_DIR"\n'
_TEARDOWN = '#!/bin/sh\nset -eu\nrm -rf "$VOL_DIR"\n'


def manifests(layout: Layout) -> list[Json]:
    """Return all manifests in an order in which they can be created."""
    return [*_dns(layout), *_ingress(layout), *_volumes(layout)]


def _dns(layout: Layout) -> list[Json]:
    rules = [
        _rule("", "list watch", "endpoints services pods namespaces"),
        _rule("discovery.k8s.io", "list watch", "endpointslices"),
    ]
    container = {
        "args": ["-conf", "/etc/coredns/Corefile"],
        "readinessProbe": _probe("/ready", 8181),
        "volumeMounts": [{"name": "settings", "mountPath": "/etc/coredns"}],
        "securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}, "runAsUser": 0},
    }
    pod = {"dnsPolicy": "Default", "volumes": [{"name": "settings", "configMap": {"name": "coredns"}}]}
    ports = [{"name": f"dns-{kind.lower()}", "port": 53, "protocol": kind} for kind in ("UDP", "TCP")]
    service = {"selector": {"app": "coredns"}, "clusterIP": DNS_ADDRESS, "ports": ports}
    return [
        *_account("coredns", SYSTEM_NAMESPACE, rules),
        _object("v1", "ConfigMap", "coredns", SYSTEM_NAMESPACE, data={"Corefile": _COREFILE}),
        _deployment(layout, "coredns", SYSTEM_NAMESPACE, image_name(COREDNS), container, pod),
        _object("v1", "Service", "kube-dns", SYSTEM_NAMESPACE, spec=service),
    ]


def _ingress(layout: Layout) -> list[Json]:
    rules = [
        _rule("", "get list watch", "services endpoints secrets configmaps nodes namespaces"),
        _rule("discovery.k8s.io", "list watch", "endpointslices"),
        _rule("networking.k8s.io", "get list watch", "ingresses ingressclasses"),
        _rule("networking.k8s.io", "update", "ingresses/status"),
        _rule(_GATEWAY_API, "get list watch", _ROUTING),
        _rule(_GATEWAY_API, "update", " ".join(f"{kind}/status" for kind in _ROUTING.split())),
    ]
    container = {
        "args": [
            f"--entrypoints.web.address=:{INGRESS_PORT}",
            "--providers.kubernetesingress=true",
            f"--providers.kubernetesingress.ingressendpoint.ip={INGRESS_ADDRESS}",
            "--providers.kubernetesgateway=true",
            "--providers.providersthrottleduration=100ms",
            "--log.level=DEBUG",  # only at this level does it log why it cut an answer off
            "--ping=true",
            "--ping.entrypoint=web",
            "--global.checknewversion=false",
            "--global.sendanonymoususage=false",
        ],
        "readinessProbe": _probe("/ping", INGRESS_PORT),
        "securityContext": {"runAsUser": UNPRIVILEGED_USER},
        # Without a request it would get only idle processor time, and cut answers off when it is late
        # (gateway/http/behind_proxy.py).
        "resources": {"requests": {"cpu": "200m"}},
    }
    ports = [{"name": "web", "port": 80, "targetPort": INGRESS_PORT}]
    service = {"selector": {"app": "traefik"}, "clusterIP": INGRESS_ADDRESS, "ports": ports}
    ingress_class = _object(
        "networking.k8s.io/v1", "IngressClass", "traefik", spec={"controller": "traefik.io/ingress-controller"}
    )
    ingress_class["metadata"]["annotations"] = {"ingressclass.kubernetes.io/is-default-class": "true"}
    return [
        *_account("traefik", SYSTEM_NAMESPACE, rules),
        _deployment(layout, "traefik", SYSTEM_NAMESPACE, image_name(TRAEFIK), container, {}),
        _object("v1", "Service", "traefik", SYSTEM_NAMESPACE, spec=service),
        ingress_class,
        _object(
            f"{_GATEWAY_API}/v1", "GatewayClass", "traefik", spec={"controllerName": "traefik.io/gateway-controller"}
        ),
    ]


def _volumes(layout: Layout) -> list[Json]:
    """Return the provisioner of volumes: a claim gets a folder on the node of its first pod, and stays there."""
    rules = [
        _rule("", "get list watch", "nodes persistentvolumeclaims configmaps pods pods/log"),
        _rule("", "get list watch create patch update delete", "persistentvolumes pods"),
        _rule("", "create patch", "events"),
        _rule("storage.k8s.io", "get list watch", "storageclasses"),
    ]
    folders = {"nodePathMap": [{"node": "DEFAULT_PATH_FOR_NON_LISTED_NODES", "paths": ["/var/lib/volumes"]}]}
    settings = {
        "config.json": json.dumps(folders),
        "setup": _SETUP,
        "teardown": _TEARDOWN,
        "helperPod.yaml": json.dumps(_helper_pod()),
    }
    container = {
        "args": [
            "start",
            "--config",
            "/etc/config/config.json",
            "--helper-image",
            TOOLBOX,
            "--service-account-name",
            "local-path",
        ],
        "volumeMounts": [{"name": "settings", "mountPath": "/etc/config"}],
        "env": [{"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
        "securityContext": {"runAsUser": UNPRIVILEGED_USER},
    }
    pod = {"volumes": [{"name": "settings", "configMap": {"name": "local-path-config"}}]}
    storage_class = _object(
        "storage.k8s.io/v1",
        "StorageClass",
        "local-path",
        provisioner="rancher.io/local-path",
        volumeBindingMode="WaitForFirstConsumer",
        reclaimPolicy="Delete",
    )
    storage_class["metadata"]["annotations"] = {"storageclass.kubernetes.io/is-default-class": "true"}
    return [
        _object("v1", "Namespace", VOLUMES_NAMESPACE),
        *_account("local-path", VOLUMES_NAMESPACE, rules),
        _object("v1", "ConfigMap", "local-path-config", VOLUMES_NAMESPACE, data=settings),
        _deployment(layout, "local-path", VOLUMES_NAMESPACE, image_name(LOCAL_PATH), container, pod),
        storage_class,
    ]


def _helper_pod() -> Json:
    """Return the pod that makes and removes a folder of a node; the provisioner adds the rest."""
    container = {"name": "helper-pod", "image": TOOLBOX, "securityContext": {"runAsUser": 0}}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "helper-pod"}, "spec": spec}


def _deployment(layout: Layout, name: str, namespace: str, image: str, container: Json, pod: Json) -> Json:
    containers = [{"name": name, "image": image, "imagePullPolicy": "Never", **container}]
    spec = {
        "serviceAccountName": name,
        "nodeSelector": {"kubernetes.io/hostname": layout.first_node.name},
        "terminationGracePeriodSeconds": 0,
        "containers": containers,
        **pod,
    }
    template = {"metadata": {"labels": {"app": name}}, "spec": spec}
    return _object(
        "apps/v1",
        "Deployment",
        name,
        namespace,
        spec={"selector": {"matchLabels": {"app": name}}, "template": template},
    )


def _account(name: str, namespace: str, rules: list[Json]) -> list[Json]:
    """Return a service account, and its rights in all namespaces."""
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    return [
        _object("v1", "ServiceAccount", name, namespace),
        _object("rbac.authorization.k8s.io/v1", "ClusterRole", name, rules=rules),
        _object("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", name, roleRef=role, subjects=[subject]),
    ]


def _rule(group: str, verbs: str, resources: str) -> Json:
    return {"apiGroups": [group], "verbs": verbs.split(), "resources": resources.split()}


def _probe(path: str, port: int) -> Json:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": 1}


def _object(version: str, kind: str, name: str, namespace: str | None = None, **content: Any) -> Json:
    metadata: Json = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}
