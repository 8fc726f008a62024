"""Secrets that the operator makes: the pool's password, an API key where none was given, and the certificates.

The first two are drawn only where no Secret of the name exists, and never change. Whether a Secret goes with the
resource is decided when it is made (deletionPolicy).
"""

import base64
import hashlib
import secrets

from orca.core.api_keys import ApiKey, digest, line, make_key
from orca.operator import authority, names
from orca.operator.actions import Issue
from orca.operator.certificates import CA, server_name
from orca.operator.render import group, pool
from orca.operator.render.objects import metadata
from orca.operator.resource import Deployment, Json
from orca.pool.access import acl_lines


def pool_secret(deployment: Deployment) -> Json:
    """The pool's password, and the users of Redis as it reads them."""
    password = secrets.token_urlsafe(32)
    hashed = "#" + hashlib.sha256(password.encode()).hexdigest()
    lines = acl_lines(pool.word(deployment), pool.USER, hashed)
    return _secret(deployment, names.pool(deployment.name), "pool", password=password, **{"users.acl": _text(lines)})


def api_key_secret(deployment: Deployment) -> Json:
    """One key without limits, and the line by which the gateways know it."""
    key = make_key()
    name = names.api_key(deployment.name)
    return _secret(
        deployment, name, "gateway", key=key, **{names.API_KEYS_FILE: _text([line(ApiKey("default", digest(key)))])}
    )


def certificates_secret(deployment: Deployment, action: Issue, now_s: float) -> Json:
    """What schedulers and stages show each other."""
    drawn = authority.issue(deployment.name, server_name(deployment), action.signer, now_s)
    texts = drawn | {CA: drawn[CA] + action.trusted} | action.kept
    return _secret(deployment, names.certificates(deployment.name), group.SCHEDULER, **texts)


def _secret(deployment: Deployment, name: str, role: str, **texts: str) -> Json:
    marks = metadata(deployment, name, role)
    # Not stringData, which an apply leaves in a Secret's managed fields as something that it does not have.
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": marks, "type": "Opaque", "data": data}


def _text(lines: list[str]) -> str:
    return "\n".join([*lines, ""])
