"""A real API server with etcd, on loopback, and the real controllers where a test wants them; no node runs anything.

Its programs are those of the local cluster (e2e/cluster): taken from their cache, never built here.
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from kubernetes import client

from orca.core.process.ports import free_port

TOKEN = "administrator"
START_S = 60.0
CRD = Path(__file__).parents[3] / "charts/orca/crd/orcadeployments.yaml"


@dataclass(frozen=True, slots=True)
class ApiServer:
    """One that answers."""

    url: str
    folder: Path

    def api(self, token: str = TOKEN) -> client.ApiClient:
        configuration = client.Configuration()
        configuration.host = self.url
        configuration.ssl_ca_cert = str(self.certificate)
        configuration.api_key = {"authorization": f"Bearer {token}"}
        return client.ApiClient(configuration)

    @property
    def certificate(self) -> Path:
        """It signs its own."""
        return self.folder / "certificates" / "apiserver.crt"

    @property
    def kubeconfig(self) -> Path:
        return self.write_kubeconfig(self.folder / "kubeconfig", self.url)

    def write_kubeconfig(self, path: Path, url: str, token: str = TOKEN) -> Path:
        """Args: url: of the server itself, or of what stands before it."""
        cluster = {"server": url, "certificate-authority": str(self.certificate)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "administrator"}}],
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "administrator", "user": {"token": token}}],
        }
        path.write_text(json.dumps(content))
        return path


@contextlib.contextmanager
def api_server(programs: dict[str, Path], folder: Path, *, controllers: bool = False) -> Iterator[ApiServer]:
    """Starts in some four seconds.

    Args:
        programs: paths of etcd, kube-apiserver, and of kube-controller-manager and kube-scheduler with controllers.
        controllers: with the real controllers and scheduler; nodes are objects that the test makes.
    Raises: AssertionError with the end of the log of what did not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    etcd_port, peer_port, port = free_port(), free_port(), free_port()
    (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
    subprocess.run(
        ["openssl", "genrsa", "-out", str(folder / "sa.key"), "2048"], check=True, capture_output=True, timeout=60
    )
    server = ApiServer(f"https://127.0.0.1:{port}", folder)
    with contextlib.ExitStack() as running:

        def start(name: str, *words: str) -> None:
            running.enter_context(_process(programs[name], folder / f"{name}.log", words))

        start(
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd_port}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd_port}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer_port}",
            f"--initial-cluster=default=http://127.0.0.1:{peer_port}",
            "--unsafe-no-fsync",
        )
        start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'sa.key'}",
            f"--service-account-signing-key-file={folder / 'sa.key'}",
            # Both families, so that Services may ask for them.
            "--service-cluster-ip-range=10.96.0.0/16,fd00:96::/108",
            "--disable-admission-plugins=ServiceAccount",
        )
        _wait_until_ready(server, folder / "kube-apiserver.log")
        if controllers:
            flags = (f"--kubeconfig={server.kubeconfig}", "--leader-elect=false", "--bind-address=127.0.0.1")
            # Simulated nodes have no heartbeat: after 40 s without one they would be tainted as lost.
            patience = "--node-monitor-grace-period=24h"
            start("kube-controller-manager", *flags, patience, f"--secure-port={free_port()}")
            start("kube-scheduler", *flags, f"--secure-port={free_port()}")
        yield server


def install_crd(server: ApiServer, file: Path = CRD) -> None:
    """Install the definition of the OrcaDeployment, or the only one of another file; wait until it is served."""
    body = yaml.safe_load(file.read_text())
    client.ApiextensionsV1Api(server.api()).create_custom_resource_definition(body)
    version = next(each["name"] for each in body["spec"]["versions"] if each["served"])
    objects = client.CustomObjectsApi(server.api())
    deadline = time.monotonic() + START_S
    while True:
        try:
            objects.list_cluster_custom_object(body["spec"]["group"], version, body["spec"]["names"]["plural"])
            return
        except client.ApiException:
            assert time.monotonic() < deadline, f"the API server does not serve {file.name}"
            time.sleep(0.05)


@contextlib.contextmanager
def _process(program: Path, log: Path, words: tuple[str, ...]) -> Iterator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen([str(program), *words], stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(server: ApiServer, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            client.CoreV1Api(server.api()).list_namespace(_request_timeout=2)
            return
        except Exception:
            assert time.monotonic() < deadline, f"the API server did not start:\n{log.read_text()[-2000:]}"
            time.sleep(0.1)
