"""A plan for spec.slo, as a user sees it."""

from installation import Json, Service

PLAN_S = 1500.0
"""Bound on profile, search and rollout together."""

WORKER: Json = {"threads": 1, "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}}}


def plan_of(service: Service) -> Json:
    """Return the plan in force with its figures; empty if there is none."""
    return dict(service.get().get("status", {}).get("plan") or {})


def of_role(service: Service, kind: str, role: str) -> list[Json]:
    """Return the objects of a role, such as the Jobs of a profile, and the ConfigMaps with what they have found."""
    selector = f"--selector=orca-serving.io/deployment={service.name},orca-serving.io/role={role}"
    found: list[Json] = service.kubectl.get(kind, f"--namespace={service.namespace}", selector)["items"]
    return found
