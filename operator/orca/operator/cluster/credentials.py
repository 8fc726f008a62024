"""Secrets that the operator makes: the pool's password, an API key where none was given, and the certificates.

The first two are drawn only where no Secret of the name exists; the rights of the pool's user follow the release, and
nothing else of them changes. Whether a Secret goes with the resource is decided when it is made (deletionPolicy).
"""

import base64
import hashlib
import secrets

from orca.core.api_keys import ApiKey, key_digest, key_line, make_key
from orca.operator.cluster import authority
from orca.operator.domain import names
from orca.operator.domain.actions import Issue
from orca.operator.domain.certificates import CA, server_name
from orca.operator.domain.observed import label_map
from orca.operator.domain.resource import Deployment, Json
from orca.operator.render import group, pool
from orca.operator.render.objects import metadata
from orca.pool.redis.access import acl_lines


def pool_secret(deployment: Deployment) -> Json:
    """The pool's password, and the users of Redis as it reads them."""
    password = secrets.token_urlsafe(32)
    return _pool_secret(deployment, password, _user_lines(deployment, password))


def renewed_pool_secret(deployment: Deployment, secret: Json) -> Json | None:
    """The pool's Secret with the rights that this release's parts need; None where its user has them, and where no
    operator has made it.

    Rights that are there stay: parts of another release may use them, during an upgrade or behind its rollback, and
    operators of two releases do not undo each other's. So do other users, whom somebody has added.
    """
    data = secret.get("data") or {}
    if names.HASH_LABEL not in label_map(secret) or "password" not in data:
        return None
    try:
        password, users = (base64.b64decode(data.get(key, "")).decode() for key in ("password", pool.USERS_FILE))
    except ValueError:
        # It holds what is no text, so the pool cannot be asked, and the status says so.
        return None
    lines, us = users.splitlines(), ["user", pool.USER]
    *default, own = _user_lines(deployment, password)
    wanted, known = own.split(), [word for line in lines if line.split()[:2] == us for word in line.split()]
    if set(wanted) <= set(known):
        return None
    more = [word for word in known if word.startswith("+") and word not in wanted]
    others = [line for line in lines if line.split()[:2] != us] or default
    renewed = _pool_secret(deployment, password, [*others, " ".join([*wanted, *more])])
    # With its uid: one that was made anew meanwhile has a password of its own.
    return {**renewed, "metadata": renewed["metadata"] | {"uid": secret["metadata"]["uid"]}}


def _user_lines(deployment: Deployment, password: str) -> list[str]:
    # As clients read it from a file: without the newline that editors leave behind.
    hashed = "#" + hashlib.sha256(password.strip().encode()).hexdigest()
    return acl_lines(pool.word(deployment), pool.USER, hashed)


def _pool_secret(deployment: Deployment, password: str, users: list[str]) -> Json:
    texts = {"password": password, pool.USERS_FILE: _text(users)}
    return _secret(deployment, names.pool(deployment.name), pool.ROLE, **texts)


def api_key_secret(deployment: Deployment) -> Json:
    """One key without limits, and the line by which the gateways know it."""
    key = make_key()
    name = names.api_key(deployment.name)
    return _secret(
        deployment,
        name,
        "gateway",
        key=key,
        **{names.API_KEYS_FILE: _text([key_line(ApiKey("default", key_digest(key)))])},
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
