"""The files between the comparison and the peers that it starts: one file in, one file out, both JSON.

A peer is its own process, so that no two compared systems share an interpreter, threads or memory.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from orca.bench.turns.trace import FixedTrace
from orca.planner.workload.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWorkload:
    """The same requests for every system."""

    model: str  # folder
    prompts: list[list[int]]  # token ids, in order of arrival
    new_tokens: list[int]  # greedy tokens to generate for each, EOS or not
    batch_size: int
    threads: int
    arrivals_s: list[float] | None = None  # of each request, after the start; None: all arrive at the start
    is_shared: bool = False  # prompts begin alike, and each system uses its prefix cache

    @staticmethod
    def of(trace: Trace, model: Path, vocab_size: int, *, batch_size: int, threads: int) -> "PeerWorkload":
        return PeerWorkload(
            model=str(model),
            prompts=[trace.prompt(request.index, vocab_size) for request in trace.requests],
            new_tokens=[request.new_tokens for request in trace.requests],
            batch_size=batch_size,
            threads=threads,
            arrivals_s=None if trace.spec.rate is None else [request.arrival_s for request in trace.requests],
            is_shared=isinstance(trace, FixedTrace),
        )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> "PeerWorkload":
        return PeerWorkload(**json.loads(path.read_text()))

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.new_tokens, strict=True))

    def cache_gib(self, block_tokens: int) -> int:
        """Return the whole GiB for a full batch of the longest requests in float32, so that a cache never limits a
        peer.

        The model must be of llama type or GPT-2 type: the bytes of a token follow from its config.json.
        """
        config: dict[str, int] = json.loads((Path(self.model) / "config.json").read_text())
        hidden = config.get("hidden_size") or config["n_embd"]
        heads = config.get("num_attention_heads") or config["n_head"]
        key_heads = config.get("num_key_value_heads") or heads
        layers = config.get("num_hidden_layers") or config["n_layer"]
        token_bytes = 2 * layers * key_heads * (config.get("head_dim") or hidden // heads) * 4
        whole_blocks = -(-self.longest // block_tokens) * block_tokens
        return -(-self.batch_size * whole_blocks * token_bytes // 2**30)

    def head(self, requests: int) -> "PeerWorkload":
        """Return the first requests, all at the start, with at most four tokens each, to warm a system up.

        Their prompts are reversed, so that no prefix cache finds them later.
        """
        return PeerWorkload(
            model=self.model,
            prompts=[prompt[::-1] for prompt in self.prompts[:requests]],
            new_tokens=[min(4, count) for count in self.new_tokens[:requests]],
            batch_size=self.batch_size,
            threads=self.threads,
            is_shared=self.is_shared,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """The answer of one system to a workload."""

    seconds: float  # from submitting the first request to the last token
    tokens: list[list[int]]  # generated ids of each request
    limit_seconds: float | None = None  # time of the matrix products alone; only for the engine
    # For each request, seconds after its arrival; None if the system does not report them.
    first_s: list[float] | None = None  # first token
    last_s: list[float] | None = None  # last token

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> "PeerAnswer":
        return PeerAnswer(**json.loads(path.read_text()))
