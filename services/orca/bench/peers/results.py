"""The results of each compared system: figures of every round, and the judgement of its tokens."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType

from orca.bench.peers.judgement import Judgement
from orca.bench.peers.memory import ProcessPeak, RankMemory
from orca.bench.peers.workload import PeerAnswer
from orca.planner.simulate.outcomes import Spread, spread

STATIC, CONTINUOUS = "transformers static", "transformers continuous"
OPENVINO_F32, OPENVINO_DEFAULT = "openvino f32", "openvino default"
VLLM, VLLM_BFLOAT16, VLLM_HTTP = "vllm", "vllm bfloat16", "vllm over HTTP"
ENGINE, ENGINE_BFLOAT16, ENGINE_INT8 = "orca engine", "orca engine bfloat16", "orca engine int8"
ORCA, ORCA_BFLOAT16, ORCA_INT8 = "orca over HTTP", "orca over HTTP bfloat16", "orca over HTTP int8"

# Only with encoder-decoder models: static batches, formed in the order of arrival or by a length.
STATIC_BY_ARRIVAL, STATIC_BY_SOURCE = "transformers by arrival", "transformers by source"
STATIC_BY_ANSWER = "transformers by answer"
CTRANSLATE2_BY_SOURCE, CTRANSLATE2_BY_ANSWER = "ctranslate2 by source", "ctranslate2 by answer"
CTRANSLATE2_INT8 = "ctranslate2 int8"
CTRANSLATE2_TWO = "ctranslate2 two batches"
"""Two batches at once, which share the threads; with a rate, of at most 8 requests each."""
CTRANSLATE2_UP_TO: Mapping[int, str] = MappingProxyType({limit: f"ctranslate2 up to {limit}" for limit in (4, 8, 16)})
"""Most requests of a batch, which has all that wait -> name."""

NOT_JUDGED = {
    OPENVINO_DEFAULT: "lengths only: computes in bfloat16, cache of 8 bits",
    VLLM_BFLOAT16: "lengths only: computes in bfloat16",
    ENGINE_BFLOAT16: "lengths only: computes in bfloat16",
    ORCA_BFLOAT16: "lengths only: computes in bfloat16",
    CTRANSLATE2_INT8: "lengths only: weights of 8 bits",
    ENGINE_INT8: "lengths only: weights of 8 bits",
    ORCA_INT8: "lengths only: weights of 8 bits",
}
"""Systems that do not compute in float32, so that their tokens may differ for a good reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """The latencies of the requests of one round, in seconds from their arrival."""

    first_token_s: Spread
    normalised_s: Spread  # end to end, per generated token
    whole_s: Spread  # end to end: the whole answer

    @staticmethod
    def of(answer: PeerAnswer, new_tokens: Sequence[int]) -> "Latencies | None":
        """Return the latencies of an answer; None if the system did not report the times of its tokens."""
        if answer.first_s is None or answer.last_s is None:
            return None
        first, whole = spread(answer.first_s), spread(answer.last_s)
        normalised = spread(last / count for last, count in zip(answer.last_s, new_tokens, strict=True))
        assert first is not None
        assert normalised is not None
        assert whole is not None
        return Latencies(first_token_s=first, normalised_s=normalised, whole_s=whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRound:
    """One run of one system."""

    answer: PeerAnswer
    memory: list[ProcessPeak]  # one per process
    rank_memory: RankMemory | None = None  # of a system with ranks


@dataclass(slots=True)
class PeerResult:
    """The results of one system, with one value per round."""

    name: str
    tokens_per_s: list[float] = field(default_factory=list)
    answers: list[list[list[int]]] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    shares_of_limit: list[float] = field(default_factory=list)  # engine only: time of its matrix products / whole time
    latencies: list[Latencies] = field(default_factory=list)  # of systems that report the times of tokens
    memory: list[list[ProcessPeak]] = field(default_factory=list)  # of each of its processes
    rank_memory: list[RankMemory] = field(default_factory=list)  # of systems with ranks

    def add(self, peer_round: PeerRound, new_tokens: Sequence[int]) -> None:
        """Add a round. Args: new_tokens: number of requested tokens, by request."""
        answer = peer_round.answer
        self.tokens_per_s.append(sum(new_tokens) / answer.seconds)
        self.answers.append(answer.tokens)
        self.memory.append(peer_round.memory)
        if answer.limit_seconds is not None:
            self.shares_of_limit.append(answer.limit_seconds / answer.seconds)
        if (latencies := Latencies.of(answer, new_tokens)) is not None:
            self.latencies.append(latencies)
        if peer_round.rank_memory is not None:
            self.rank_memory.append(peer_round.rank_memory)

    @property
    def median_tokens_per_s(self) -> float:
        return median(self.tokens_per_s)

    def median_latency(self, figure: Callable[[Latencies], float]) -> float:
        return median(map(figure, self.latencies))

    @property
    def peaks(self) -> list[ProcessPeak]:
        """The peak of each process over all rounds; processes with the same name are matched by their order."""
        most: dict[tuple[str, int], ProcessPeak] = {}
        for peaks in self.memory:
            seen: Counter[str] = Counter()
            for peak in peaks:
                place = peak.name, seen[peak.name]
                seen[peak.name] += 1
                most.setdefault(place, ProcessPeak(peak.name)).raise_to(peak.whole_bytes, peak.anonymous_bytes)
        return list(most.values())
