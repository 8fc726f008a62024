"""Resources of pods with several devices: with spec.slo, worker.resources are those of one."""

from orca.operator.domain.quantity import times
from orca.operator.domain.resource import ResourcesSpec


def of_devices(resources: ResourcesSpec, devices: int) -> ResourcesSpec:
    """Return the resources of a pod. Args: resources: of one device."""
    if devices == 1:
        return resources
    requests, limits = (
        {name: times(amount, devices) for name, amount in each.items()}
        for each in (resources.requests, resources.limits)
    )
    return ResourcesSpec(requests=requests, limits=limits)
