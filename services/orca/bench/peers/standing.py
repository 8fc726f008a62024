"""What each system under comparison did: figures of every round, and how its tokens were judged."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from orca.bench.peers.judgement import Judgement
from orca.bench.peers.memory import Held, Peak
from orca.bench.peers.workload import Answer
from orca.bench.report import Spread, spread

STATIC, CONTINUOUS = "transformers static", "transformers continuous"
OPENVINO_F32, OPENVINO_DEFAULT = "openvino f32", "openvino default"
VLLM, VLLM_BFLOAT16, VLLM_HTTP = "vllm", "vllm bfloat16", "vllm over HTTP"
ENGINE, ENGINE_BFLOAT16 = "orca engine", "orca engine bfloat16"
ORCA, ORCA_BFLOAT16 = "orca over HTTP", "orca over HTTP bfloat16"
NOT_JUDGED = {
    OPENVINO_DEFAULT: "lengths only: computes in bfloat16, cache of 8 bits",
    VLLM_BFLOAT16: "lengths only: computes in bfloat16",
    ENGINE_BFLOAT16: "lengths only: computes in bfloat16",
    ORCA_BFLOAT16: "lengths only: computes in bfloat16",
}
"""What is no float32, and so has other tokens with good reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of the requests of one round, in seconds from their arrival."""

    first_token_s: Spread
    normalised_s: Spread  # end to end, per generated token

    @staticmethod
    def of(answer: Answer, new_tokens: Sequence[int]) -> "Latencies | None":
        """None where the system did not tell when its tokens came."""
        if answer.first_s is None or answer.last_s is None:
            return None
        first = spread(answer.first_s)
        normalised = spread(last / count for last, count in zip(answer.last_s, new_tokens, strict=True))
        assert first is not None
        assert normalised is not None
        return Latencies(first_token_s=first, normalised_s=normalised)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One turn of one system."""

    answer: Answer
    memory: list[Peak]  # of its processes
    held: Held | None = None  # of a system with ranks


@dataclass(slots=True)
class Standing:
    """What one system did, a value per round."""

    name: str
    tokens_per_s: list[float] = field(default_factory=list)
    answers: list[list[list[int]]] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    shares_of_limit: list[float] = field(default_factory=list)  # of the engine: time of its matrix products alone
    latencies: list[Latencies] = field(default_factory=list)  # of systems that tell when tokens came
    memory: list[list[Peak]] = field(default_factory=list)  # of each of its processes
    held: list[Held] = field(default_factory=list)  # of systems with ranks

    def add(self, ran: Ran, new_tokens: Sequence[int]) -> None:
        """Note a round in which so many tokens were asked for, by request."""
        answer = ran.answer
        self.tokens_per_s.append(sum(new_tokens) / answer.seconds)
        self.answers.append(answer.tokens)
        self.memory.append(ran.memory)
        if answer.limit_seconds is not None:
            self.shares_of_limit.append(answer.limit_seconds / answer.seconds)
        if (latencies := Latencies.of(answer, new_tokens)) is not None:
            self.latencies.append(latencies)
        if ran.held is not None:
            self.held.append(ran.held)

    @property
    def median_tokens_per_s(self) -> float:
        return median(self.tokens_per_s)

    def median_latency(self, figure: Callable[[Latencies], float]) -> float:
        return median(map(figure, self.latencies))

    @property
    def peaks(self) -> list[Peak]:
        """The most that each process took in any round; processes of one name by their place among these."""
        most: dict[tuple[str, int], Peak] = {}
        for peaks in self.memory:
            seen: Counter[str] = Counter()
            for peak in peaks:
                place = peak.name, seen[peak.name]
                seen[peak.name] += 1
                most.setdefault(place, Peak(peak.name)).raise_to(peak.whole_bytes, peak.anonymous_bytes)
        return list(most.values())
