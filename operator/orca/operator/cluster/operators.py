"""Other operators, and the field of the status that names the one which serves a resource."""

from orca.operator.cluster.api_calls import ApiCalls, ApiServerError
from orca.operator.domain import names
from orca.operator.domain.resource import GROUP, KIND, PLURAL, VERSION, BadSpec, Json


def write_owner(calls: ApiCalls, body: Json, operator: str | None) -> Json:
    """Write which operator serves an OrcaDeployment. Returns: the OrcaDeployment as it is now.

    Args: body: as it was read. operator: None if none serves it any more.
    Raises:
        ApiServerError: with status 409 if the OrcaDeployment has changed since it was read.
        BadSpec: if the CRD in force is older than this operator, so that its status has no such field.
    """
    read = body["metadata"]
    metadata = {key: read[key] for key in ("name", "namespace", "uid", "resourceVersion")}
    status = {} if operator is None else {names.OPERATOR_FIELD: operator}
    patch = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "status": status}
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{read['namespace']}/{PLURAL}/{read['name']}/status"
    try:
        written: Json = calls.call("PATCH", path, patch, query={"fieldManager": names.OWNER_MANAGER, "force": "true"})
    except ApiServerError as error:
        if f".status.{names.OPERATOR_FIELD}: field not declared in schema" not in str(error):
            raise
        raise BadSpec(
            f"status.{names.OPERATOR_FIELD} is missing in the CRD: the CRD in this cluster and the operator are of"
            " different releases"
        ) from error
    return written


def trace_of_absent(calls: ApiCalls, operator: str) -> str | None:
    """Return what an operator without a Deployment has left; None if its Deployment exists, or cannot be read.

    The chart gives the Deployment and the Lease of an operator the same name. If the Lease cannot be read, the
    Deployment alone decides.

    Args: operator: NAMESPACE/NAME.
    Returns: a text that changes as long as somebody renews the Lease.
    Raises: ApiServerError if the API server does not answer.
    """
    namespace, _, name = operator.partition("/")
    try:
        if calls.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}") is not None:
            return None
    except ApiServerError as error:
        if not error.is_refusal:
            raise
        return None
    try:
        lease = calls.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")
    except ApiServerError as error:
        if not error.is_refusal:
            raise
        lease = None
    return f"{operator} {'' if lease is None else lease['metadata']['resourceVersion']}"
