"""Profiles made by hand, with times that are easy to add up."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from orca.planner.profile.profile import (
    VERSION,
    Curve,
    DegreeTimes,
    MeasuredTime,
    Profile,
    ProfileKey,
    StackShape,
    StackTimes,
    Surface,
)

ROWS = (1, 10, 100)


def time(us: float) -> MeasuredTime:
    return MeasuredTime(us=us, low_us=us, high_us=us, repeats=3)


def curve(of: Callable[[int], float], at: Sequence[int] = ROWS) -> Curve:
    return Curve(at=tuple(at), times=tuple(time(of(x)) for x in at))


def surface(of: Callable[[int, int], float], at: Sequence[int] = ROWS) -> Surface:
    return Surface(at=tuple(at), curves=tuple(curve(lambda y, x=x: of(x, y), at) for x in at))  # type: ignore[misc]


def stack(factor: float, *, is_decoder: bool = True, has_encoder: bool = False) -> StackTimes:
    """Return times that are linear in everything: a row takes 1,000 x factor, a token of context 1 x factor."""
    return StackTimes(
        rest=curve(lambda rows: factor * (5_000 + 1_000 * rows)),
        prompts=surface(lambda count, start: factor * (count + start)),
        increments=surface(lambda rows, context: factor * rows * context) if is_decoder else None,
        keep=curve(lambda rows: factor * (2_000 + 300 * rows)) if is_decoder else None,
        cross=surface(lambda rows, source: 2 * factor * rows * source) if has_encoder else None,
        memory=curve(lambda tokens: 70.0 * tokens) if has_encoder else None,
    )


def degree(ranks: int, *, has_encoder: bool = False) -> DegreeTimes:
    factor = 1 / ranks
    decoder = stack(factor, has_encoder=has_encoder)
    return DegreeTimes(
        ranks=ranks,
        stacks=(stack(3 * factor, is_decoder=False), decoder) if has_encoder else (decoder,),
        step=curve(lambda requests: 100 + 10 * requests),
        embed=curve(lambda rows: 4.0 * rows),
        head=curve(lambda rows: 900 + 20 * rows),
        all_reduce=None if ranks == 1 else curve(lambda size: 50 + size),
        weight_bytes_per_layer=(1_000, 2_000) if has_encoder else (2_000,),
        embed_bytes=500,
        head_bytes=600,
        kv_bytes_per_slot=64,
    )


def key(*, ranks: tuple[int, ...] = (1, 2), has_encoder: bool = False) -> ProfileKey:
    decoder = StackShape(layers=6, heads=4, kv_heads=4, head_dim=8, intermediate_size=64)
    encoder = StackShape(layers=4, heads=4, kv_heads=4, head_dim=8, intermediate_size=64)
    return ProfileKey(
        version=VERSION,
        architecture="t5" if has_encoder else "llama",
        stacks=(encoder, decoder) if has_encoder else (decoder,),
        hidden_size=32,
        vocab_size=97,
        max_model_len=256,
        dtype="float32",
        quantization=None,
        device="cpu",
        processor="a processor",
        processors=2,
        threads=1,
        ranks=ranks,
        devices=2,
        release="0.1.0",
    )


def profile(*, ranks: tuple[int, ...] = (1, 2), has_encoder: bool = False, sends: bool = True) -> Profile:
    own = key(ranks=ranks, has_encoder=has_encoder)
    return Profile(
        key=own,
        digest=own.digest,
        seconds=12.5,
        device_bytes=1 << 30,
        send=curve(lambda size: 30 + 0.5 * size, (128, 1_280, 12_800)) if sends else None,
        host=None,
        degrees=tuple(degree(each, has_encoder=has_encoder) for each in ranks),
    )


def profile_for(own: ProfileKey) -> Profile:
    """Return the times of `profile` under the key of another model or machine."""
    return replace(
        profile(ranks=own.ranks, has_encoder=len(own.stacks) > 1, sends=own.devices > 1), key=own, digest=own.digest
    )
