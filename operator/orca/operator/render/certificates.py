"""What scheduler and stages are given to encrypt their links: files of one Secret, and the name in its certificate."""

from orca.operator.domain import names
from orca.operator.domain.certificates import CA, CERTIFICATE, FILES, KEY, server_name
from orca.operator.domain.resource import Deployment, Json
from orca.operator.render.pods import secret_volume

_FOLDER = "/etc/orca/certificates"

# A folder and no single files: those would stay what they are when the Secret changes.
MOUNT: Json = {"name": "certificates", "mountPath": _FOLDER, "readOnly": True}


def settings(deployment: Deployment) -> dict[str, str]:
    """The same for both. Nothing in it changes with a renewal."""
    return {
        "tls_ca_file": f"{_FOLDER}/{CA}",
        "tls_certificate_file": f"{_FOLDER}/{CERTIFICATE}",
        "tls_key_file": f"{_FOLDER}/{KEY}",
        "tls_server_name": server_name(deployment),
    }


def volume(deployment: Deployment) -> Json:
    secret = deployment.spec.certificates.secret_name or names.certificates(deployment.name)
    return secret_volume(MOUNT["name"], secret, {key: key for key in FILES})
