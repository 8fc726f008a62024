"""Facts about what runs. The spec does not have them, since it describes only what is wanted now.

They are in labels and annotations of the operator's own, written when an object is rendered and read back here:

    StatefulSet of stages       stages      number of stage pods of the group
                                models      the model that they read
    StatefulSet of a scheduler  slots       KV slots of the group, or `all` for as many as its memory holds
                                model       label: digest of what decides outputs
                                generation  label: generation of the model
                                pool        as on the Deployment of gateways
    Deployment of gateways      pool        URL of the external Redis that holds the requests, without credentials
    pods of gateways            models      their own model, then older ones whose answers they still read
    claim of a fetched model    fetched     the model that is complete in it
    Job that measures a model   devices-lent  when groups began to lend it devices

The arguments of containers say the same, but users may patch those. Users may edit a label or an annotation too. If one
is missing or unreadable, the fact is unknown, and the plan assumes what loses no request. On an object that the spec
still wants it is drift like any other: the operator writes it again, but for `devices-lent`, which it writes once.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.model_references import ModelReference, read_model
from orca.operator.domain.objects import annotations, label_map, seconds, timestamp
from orca.operator.domain.resource import Json, ModelSpec

STAGES_MAX = 64
"""The bound in the CRD."""

_ALL_SLOTS = "all"
_KEPT = (names.STAGES_ANNOTATION, names.SLOTS_ANNOTATION, names.MODELS_ANNOTATION, names.POOL_ANNOTATION)


def stages_annotations(count: int, model: ModelReference) -> dict[str, str]:
    """Return the facts on a StatefulSet of stages."""
    return {names.STAGES_ANNOTATION: str(count), **models_annotations([model])}


def slots_annotations(slots: int | None) -> dict[str, str]:
    """Return the facts on a StatefulSet of a scheduler. Args: slots: None for as many as the memory holds."""
    return {names.SLOTS_ANNOTATION: _ALL_SLOTS if slots is None else str(slots)}


def models_annotations(models: Sequence[ModelReference]) -> dict[str, str]:
    """Return the facts on whatever reads models. Args: models: its own first."""
    return {names.MODELS_ANNOTATION: json.dumps([each.as_json() for each in models], sort_keys=True)}


def pool_annotations(url: str | None) -> dict[str, str]:
    """Return the fact on whatever uses an external pool. Args: url: None for a managed pool, or if it is unknown."""
    return {} if url is None else {names.POOL_ANNOTATION: url}


def fetched_annotations(model: ModelSpec, claim: Json) -> dict[str, str]:
    """Return the fact on a claim in which a model is complete.

    It names the very claim. Tools copy annotations to a claim that they make again, and that one is empty.
    """
    fetched = {"uri": model.uri, "revision": model.revision, "endpoint": model.endpoint}
    known = {"claim": claim["metadata"]["uid"], **{name: value for name, value in fetched.items() if value is not None}}
    return {names.FETCHED_ANNOTATION: json.dumps(known, sort_keys=True)}


def is_fetched(model: ModelSpec, claim: Json) -> bool:
    """Return whether a claim says that a model is complete in it."""
    return fetched_annotations(model, claim).items() <= annotations(claim["metadata"]).items()


def lent_annotations(now_s: float) -> dict[str, str]:
    """Return the fact on a Job to which a group lends its devices. Args: now_s: seconds since 1970."""
    return {names.LOAN_ANNOTATION: timestamp(now_s)}


def lent_s(job: Json) -> float | None:
    """Return when a group began to lend its devices to a Job, in seconds since 1970; None if none has.

    If it is unreadable, that was long ago: no second group lends.
    """
    written = annotations(job["metadata"]).get(names.LOAN_ANNOTATION)
    if written is None:
        return None
    try:
        return seconds(written)
    except (TypeError, ValueError):
        return 0.0


def kept_annotations(there: Json) -> dict[str, str]:
    """Return the facts on an object, to write them again with it."""
    return {key: value for key, value in annotations(there["metadata"]).items() if key in _KEPT}


def stage_count(stages: Json) -> int | None:
    """Return the number of stage pods of a group; None if it is unknown. Args: stages: its StatefulSet."""
    count = _whole_number(annotations(stages["metadata"]).get(names.STAGES_ANNOTATION))
    return count if count is not None and 1 <= count <= STAGES_MAX else None


def slots(scheduler: Json) -> int | None:
    """Return the KV slots of a group; None if it takes as many as its memory holds, and if they are unknown.

    Args: scheduler: its StatefulSet.
    """
    return _whole_number(annotations(scheduler["metadata"]).get(names.SLOTS_ANNOTATION))


def are_slots_known(scheduler: Json) -> bool:
    """Return whether the annotation tells the slots of a group. Args: scheduler: its StatefulSet."""
    return slots(scheduler) is not None or annotations(scheduler["metadata"]).get(names.SLOTS_ANNOTATION) == _ALL_SLOTS


def pool_url(workload: Json) -> str | None:
    """Return the URL of the external pool that a workload uses; None for a managed one, and if it is unknown."""
    return annotations(workload["metadata"]).get(names.POOL_ANNOTATION)


def models(metadata: Mapping[str, Any]) -> list[ModelReference]:
    """Return the models that a pod reads, its own first; none if they are unknown.

    Args: metadata: of the pod, of a template for pods, or of a StatefulSet of stages.
    """
    try:
        found = json.loads(annotations(metadata).get(names.MODELS_ANNOTATION, "[]"))
        return [read_model(each) for each in found] if isinstance(found, list) else []
    except (ValueError, RecursionError):
        return []


def model_digest(scheduler: Json) -> str | None:
    """Return the digest of what decides a scheduler's outputs; None if it is unknown."""
    return label_map(scheduler).get(names.MODEL_LABEL)


def generation(scheduler: Json) -> int:
    """Return the generation of a scheduler's model; 0 if it is unknown."""
    for labels in (label_map(scheduler), scheduler["metadata"].get("labels") or {}):
        number = _whole_number(labels.get(names.GENERATION_LABEL))
        if number is not None:
            return number
    return 0


def _whole_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and text.isascii() and len(text) < 20 else None
