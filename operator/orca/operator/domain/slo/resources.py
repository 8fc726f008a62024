"""Devices of profiles, and resources of pods with several devices: with spec.slo, worker.resources are those of one."""

from orca.operator.domain.quantity import times
from orca.operator.domain.resource import OrcaDeployment, ResourcesSpec


def profiled_devices(deployment: OrcaDeployment) -> int:
    """Return how many devices a profile takes, all on one node. Args: deployment: as its author wrote it, with slo.

    Ranks on CPUs slow each other down, so as many run as in service. GPUs do not: those of one stage are enough, and
    two for the way from stage to stage. So a group may be larger than a node if the spec gives the number of ranks.
    """
    slo, tensor = deployment.spec.slo, deployment.constraints.tensor
    assert slo is not None
    if deployment.spec.worker.device == "cpu" or tensor is None:
        return slo.devices
    return min(slo.devices, max(tensor, 2))


def of_devices(resources: ResourcesSpec, devices: int) -> ResourcesSpec:
    """Return the resources of a pod. Args: resources: of one device."""
    if devices == 1:
        return resources
    requests, limits = (
        {name: times(amount, devices) for name, amount in each.items()}
        for each in (resources.requests, resources.limits)
    )
    return ResourcesSpec(requests=requests, limits=limits)
