"""Dry runs: the API server answers, and nothing is stored."""

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from orca.operator.cluster.api_server import KINDS
from orca.operator.domain import names
from orca.operator.domain.resource import GROUP, KIND, PLURAL, VERSION, Json
from support.operator.api_server import TOKEN, ApiServer


@dataclass(frozen=True, slots=True)
class DryRunAnswer:
    """The API server's answer to a dry run."""

    status: int
    body: Json
    warnings: tuple[str, ...]

    @property
    def is_yes(self) -> bool:
        return self.status < 300

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.body.get('message', 'yes')} {self.warnings}"


class DryRun:
    """Dry runs in one namespace."""

    def __init__(self, client: httpx.Client, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        self._known: dict[str, DryRunAnswer] = {}

    def create(self, spec: Json, name: str = "shop") -> DryRunAnswer:
        """An OrcaDeployment, strictly: fields that nobody knows are refused."""
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": name}, "spec": spec}
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{self.namespace}/{PLURAL}"
        params = {"dryRun": "All", "fieldValidation": "Strict"}
        return _said(self._client.post(path, params=params, json=body))

    def apply(self, manifest: Json) -> DryRunAnswer:
        """Apply a manifest as the operator does; each manifest is tried once."""
        text = json.dumps(manifest, sort_keys=True)
        if text not in self._known:
            kind, metadata = KINDS[manifest["kind"]], manifest["metadata"]
            path = f"/{kind.api}/namespaces/{metadata['namespace']}/{kind.plural}/{metadata['name']}"
            params = {"dryRun": "All", "fieldManager": names.MANAGER, "force": "true", "fieldValidation": "Strict"}
            headers = {"Content-Type": "application/apply-patch+yaml"}
            self._known[text] = _said(self._client.patch(path, params=params, headers=headers, content=text))
        return self._known[text]


@contextmanager
def dry_run(server: ApiServer, namespace: str) -> Iterator[DryRun]:
    """Args: namespace: one that is there."""
    trust = ssl.create_default_context(cafile=str(server.certificate))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, verify=trust, headers=headers, timeout=30) as client:
        yield DryRun(client, namespace)


def _said(response: httpx.Response) -> DryRunAnswer:
    is_json = response.headers["Content-Type"].startswith("application/json")
    body = response.json() if is_json else {"message": response.text}
    return DryRunAnswer(response.status_code, body, tuple(response.headers.get_list("Warning")))
