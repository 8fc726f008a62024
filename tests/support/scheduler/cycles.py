"""Controls of round-robin allocation for random tests."""

import random

from hypothesis import strategies as st

from orca.scheduler.policy.cycle import CycleControls


@st.composite
def cycles(draw: st.DrawFn, most: int) -> CycleControls:
    """Draw controls that a group of so many requests can reach, with and without a plan."""
    encode_batch = draw(st.integers(1, most))
    return CycleControls(
        encode_batch=encode_batch,
        decode_steps=draw(st.integers(1, 4)),
        decode_batch=draw(st.none() | st.integers(encode_batch, most)),
        encode_tokens=draw(st.none() | st.integers(1, 12)),
        threshold_percent=draw(st.sampled_from([0, 12, 100])),
    )


def a_random_cycle(chance: random.Random, most: int) -> CycleControls:
    """The same from a seeded source."""
    encode_batch = chance.randint(1, most)
    return CycleControls(
        encode_batch=encode_batch,
        decode_steps=chance.randint(1, 5),
        decode_batch=chance.choice([None, chance.randint(encode_batch, most)]),
        encode_tokens=chance.choice([None, chance.randint(1, 20)]),
        threshold_percent=chance.choice([0, 12, 50]),
    )
