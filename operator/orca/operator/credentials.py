"""Secrets that the operator makes once and never changes: the pool's password, and an API key where none was given.

They are drawn only where no Secret of the name exists. Whether they go with the resource is decided when they are made
(deletionPolicy).
"""

import hashlib
import secrets

from orca.core.api_keys import ApiKey, digest, line, make_key
from orca.operator import names
from orca.operator.render import pool
from orca.operator.resource import Deployment, Json
from orca.pool.access import acl_lines

API_KEYS_FILE = "keys"
"""Key of the Secret that holds the file of hashed keys; `key` beside it holds the key itself, for people."""


def pool_secret(deployment: Deployment, password: str | None = None) -> Json:
    """The pool's password, and the users of Redis as it reads them. Args: password: None draws one."""
    password = password or secrets.token_urlsafe(32)
    hashed = "#" + hashlib.sha256(password.encode()).hexdigest()
    lines = acl_lines(pool.word(deployment), pool.USER, hashed)
    return _secret(deployment, names.pool(deployment.name), "pool", password=password, **{"users.acl": _text(lines)})


def api_key_secret(deployment: Deployment) -> Json:
    """One key without limits, and the line by which the gateways know it."""
    key = make_key()
    name = names.api_key(deployment.name)
    return _secret(
        deployment, name, "gateway", key=key, **{API_KEYS_FILE: _text([line(ApiKey("default", digest(key)))])}
    )


def _secret(deployment: Deployment, name: str, role: str, **texts: str) -> Json:
    labels = names.labels(deployment.name, role)
    metadata = {"name": name, "namespace": deployment.namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": texts}


def _text(lines: list[str]) -> str:
    return "\n".join([*lines, ""])
