"""The order in which a peer with static batches takes the requests of an encoder-decoder workload.

Requests of like lengths waste least: a source is padded to the longest of its batch, and a batch decodes until its
longest answer ends. This module needs only the standard library, because peers import it too.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from orca.bench.peers.workload import PeerWorkload

ARRIVAL, BY_SOURCE, BY_ANSWER = "arrival", "by-source", "by-answer"

_KEYS: Mapping[str, Callable[[PeerWorkload], Callable[[int], int]]] = MappingProxyType(
    {
        ARRIVAL: lambda _: lambda number: number,
        BY_SOURCE: lambda workload: lambda number: -len(workload.prompts[number]),
        # No server knows the lengths of answers. This is the most that sorting could bring.
        BY_ANSWER: lambda workload: lambda number: -workload.new_tokens[number],
    }
)


def batches(workload: PeerWorkload, order: str) -> list[list[int]]:
    """Return the numbers of the requests in batches, the longest ones first if the order is by length."""
    numbers = sorted(range(len(workload.prompts)), key=_KEYS[order](workload))
    size = workload.batch_size
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]
