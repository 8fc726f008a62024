"""Exports metrics of a registry once more, under vLLM's names and labels. It reads them when they are scraped."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from orca.core.metrics.vllm_names import CACHE_LABELS, FINISHED_REASONS, SAME_MEANING, Exporter

REASON_LABEL = "finished_reason"


class MetricNames:
    """The page of one process's metrics, under Orca's names, vLLM's names, or both."""

    def __init__(self, registry: CollectorRegistry, names: Sequence[str], vllm: "VllmNames") -> None:
        """Args: registry: holds Orca's metrics; names: see `metric_names_setting`; vllm: reads the same registry."""
        renamed = CollectorRegistry()
        renamed.register(vllm)
        self._registries = [each for name, each in (("orca", registry), ("vllm", renamed)) if name in names]

    def page(self) -> bytes:
        return b"".join(map(generate_latest, self._registries))


class VllmNames(Collector):
    """Reads the registry of one part and yields the metrics that vLLM has too."""

    def __init__(
        self,
        registry: CollectorRegistry,
        exporter: Exporter,
        model_name: str,
        engine: Callable[[Mapping[str, str]], str],
    ) -> None:
        """Make the reader.

        Args:
            model_name: name by which clients call the model.
            engine: returns vLLM's label `engine` for the labels of an Orca sample.
        """
        self._registry = registry
        self._names = {row.orca: row.vllm for row in SAME_MEANING if row.exporter is exporter}
        self._model_name = model_name
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if metric.name in self._names:
                yield self._renamed(metric, self._names[metric.name])

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering this collector reads no metric."""
        return []

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in metric.samples:
            suffix = sample.name.removeprefix(metric.name)
            key = (name + suffix, tuple(self._labels(sample).items()))
            # Several of our reasons are one of vLLM's. Series of creation times keep the time of the first one.
            merge = min if suffix == "_created" else float.__add__
            values[key] = merge(values[key], sample.value) if key in values else sample.value
        renamed.samples = [Sample(full_name, dict(labels), value) for (full_name, labels), value in values.items()]
        return renamed

    def _labels(self, sample: Sample) -> dict[str, str]:
        labels = {"model_name": self._model_name, "engine": self._engine(sample.labels)}
        others = {name: text for name, text in sample.labels.items() if name not in ("model_name", "group")}
        labels |= {CACHE_LABELS.get(name, name): text for name, text in others.items()}
        if REASON_LABEL in labels:
            labels[REASON_LABEL] = FINISHED_REASONS.get(labels[REASON_LABEL], "error")
        return labels
