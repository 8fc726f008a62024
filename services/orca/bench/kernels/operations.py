"""The operations that are checked and timed, each with its bytes, its products and its reference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.paged import TokenSlots
from orca.kernels.contract.reference import AttentionView, ContextRow, KvWrite, NormParameters, attend_reference
from orca.kernels.contract.sampling_lines import LineSettings, SamplingLines
from orca.kernels.contract.sampling_reference import sample_reference
from orca.kernels.device import Kernels
from orca.kernels.gpu.sampling import sample
from orca.kernels.plain import PlainKernels

BLOCK_TOKENS = 16
_CHECKED_TOKENS = 32
"""Last tokens of a prompt whose attention is computed twice: the reference holds all their scores at once."""
_SHARE_MARGIN = 1e-5
"""Margin of cumulated probabilities, whose error is about 1e-6: within it, rounding may decide which token is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A call of a kernel."""

    name: str
    call: Callable[[], Tensor]
    bytes: int = 0  # bytes that it has to move
    flops: int = 0  # of matrix products
    check: Callable[[], float]  # largest difference from the reference, in roundings of the dtype
    rival: Callable[[], Tensor] | None = None  # PyTorch's own operation with the same result


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the operations: those of a model of 8 billion parameters on a GPU, small in the interpreter."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    tokens: int  # of a step, for operations on single tokens
    decodes: tuple[tuple[int, int], ...]  # rows and their context
    prompts: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]  # of prompts: context, and number of its last tokens that run
    mixed: tuple[int, int]  # rows and context that run together with the first prompt
    sampled: tuple[int, int]  # rows and vocabulary


LLAMA_8B = Sizes(
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=4096,
    intermediate=14336,
    tokens=8192,
    decodes=((1, 4096), (1, 32768), (32, 4096), (64, 1024), (256, 1024), (32, 16384)),
    prompts=(1024, 4096, 16384),
    chunks=((32768, 64), (16384, 512)),
    mixed=(32, 4096),
    sampled=(256, 128256),
)
SMALL = Sizes(
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=48,
    intermediate=40,
    tokens=3,
    decodes=((2, 300), (1, 17)),
    prompts=(40,),
    chunks=((1030, 20),),
    mixed=(1, 17),
    sampled=(2, 100),
)


def operations(kernels: Kernels, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Operation]:
    """Yield the operations one after the other, so that only one takes memory at a time."""
    for rows, context in sizes.decodes:
        yield _attention(kernels, sizes, dtype, device, f"decode {rows} x {context}", [(context, 1)] * rows)
    for tokens in sizes.prompts:
        yield _attention(kernels, sizes, dtype, device, f"prompt {tokens}", [(tokens, tokens)])
    for context, tokens in sizes.chunks:
        yield _attention(kernels, sizes, dtype, device, f"last {tokens} of a prompt {context}", [(context, tokens)])
    rows, context = sizes.mixed
    mixed = [(context, 1)] * rows + [(sizes.prompts[0],) * 2]
    yield _attention(kernels, sizes, dtype, device, "decode and a prompt", mixed)
    yield from _of_each_token(kernels, sizes, dtype, device)
    yield from _sampling(*sizes.sampled, device)


def _attention(
    kernels: Kernels, sizes: Sizes, dtype: torch.dtype, device: torch.device, name: str, shapes: list[tuple[int, int]]
) -> Operation:
    """Return attention of rows (context, tokens) over blocks in random order."""
    used = [-(-context // BLOCK_TOKENS) for context, _ in shapes]
    shuffled = torch.randperm(sum(used), dtype=torch.int32).split(used)
    tables = torch.nn.utils.rnn.pad_sequence(shuffled, batch_first=True).to(device)
    kv = (sum(used), 2 * sizes.kv_heads, BLOCK_TOKENS, sizes.head_dim)
    cache = torch.randn(kv, device=device).to(dtype)
    tokens = sum(count for _, count in shapes)
    qkv = torch.randn(tokens, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim, device=device).to(dtype)
    rows: list[ContextRow] = []
    first = 0
    for line, (context, count) in enumerate(shapes):
        rows.append(ContextRow(first, count, context - count, line))
        own = TokenSlots.of_positions(tables[line], context - count, context, BLOCK_TOKENS)
        own.write(cache, qkv[first : first + count, sizes.heads :])
        first += count
    head_map = [head * sizes.kv_heads // sizes.heads for head in range(sizes.heads)]
    seen = AttentionView(
        kv_of_query=head_map,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        tables=tables,
        block_tokens=BLOCK_TOKENS,
        window=None,
        dtype=dtype,
        device=device,
    )
    attention, scale = kernels.attention(rows, seen), sizes.head_dim**-0.5

    def call() -> Tensor:
        return attention(qkv, cache, scale)

    def check() -> float:
        output = call().view(tokens, sizes.heads, sizes.head_dim)
        worst = 0.0
        for row in {rows[0], rows[-1]}:
            last = min(row.count, _CHECKED_TOKENS)
            there = slice(row.first + row.count - last, row.first + row.count)
            own = ContextRow(0, last, row.end - last, row.line)
            expected = attend_reference(qkv[there, : sizes.heads], cache, [own], tables, head_map, scale=scale)
            worst = max(worst, _roundings(output[there], expected))
        return worst

    kv_bytes = 2 * sizes.kv_heads * sizes.head_dim * cache.element_size()
    flops = sum(4 * count * context - 2 * count * count for context, count in shapes) * sizes.heads * sizes.head_dim
    return Operation(
        name=f"attention, {name}",
        call=call,
        bytes=sum(context for context, _ in shapes) * kv_bytes
        + 2 * tokens * sizes.heads * sizes.head_dim * dtype.itemsize,
        flops=flops,
        check=check,
        rival=_rival(qkv, sizes, scale) if shapes == [(tokens, tokens)] and tokens > 1 else None,
    )


def _rival(qkv: Tensor, sizes: Sizes, scale: float) -> Callable[[], Tensor]:
    """Return PyTorch's attention of a whole prompt, with contiguous keys and values."""
    parts = qkv.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=1)
    query, keys, values = (part.transpose(0, 1).contiguous()[None] for part in parts)

    def call() -> Tensor:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)

    return call


def _of_each_token(kernels: Kernels, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Operation]:
    plain, size = PlainKernels(), dtype.itemsize

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, gate_up = some(sizes.tokens, sizes.hidden), some(sizes.tokens, 2 * sizes.intermediate)
    for name, bias in (("RMSNorm", None), ("LayerNorm", some(sizes.hidden))):
        norm = NormParameters(some(sizes.hidden), 1e-5, bias)
        yield Operation(
            name=f"{name} of {sizes.tokens} x {sizes.hidden}",
            call=partial(kernels.normalise, x, norm),
            bytes=2 * x.numel() * size,
            check=partial(_norm_roundings, kernels, x, norm),
        )
    yield Operation(
        name=f"silu(gate) * up of {sizes.tokens} x {sizes.intermediate}",
        call=lambda: kernels.gated(gate_up, Activation.SILU),
        bytes=3 * gate_up.numel() // 2 * size,
        check=lambda: _roundings(kernels.gated(gate_up, Activation.SILU), plain.gated(gate_up, Activation.SILU)),
    )
    yield from _with_biases(kernels, sizes, dtype, device)
    qkv = some(sizes.tokens, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    blocks = -(-sizes.tokens // BLOCK_TOKENS)
    slots = torch.randperm(blocks * BLOCK_TOKENS, device=device)[: sizes.tokens]
    turns = torch.polar(*(torch.rand(sizes.tokens, 1, sizes.head_dim // 2, device=device) for _ in range(2)))

    def kept(head_norm: NormParameters | None = None) -> KvWrite:
        cache = torch.zeros(blocks, 2 * sizes.kv_heads, BLOCK_TOKENS, sizes.head_dim, dtype=dtype, device=device)
        return KvWrite(cache, slots, turns, head_norm)

    def keep_check(head_norm: NormParameters | None = None, bias: Tensor | None = None) -> float:
        (ours, own), (theirs, other) = ((each, kept(head_norm)) for each in (qkv.clone(), qkv.clone()))
        kernels.write_kv(ours, own, bias)
        plain.write_kv(theirs, other, bias)
        return max(_roundings(ours, theirs), _roundings(own.cache, other.cache))

    def keep_call(place: KvWrite, bias: Tensor | None = None) -> Tensor:
        kernels.write_kv(qkv, place, bias)
        return qkv

    turned = sizes.tokens * (sizes.heads + sizes.kv_heads) * sizes.head_dim
    moved = 2 * turned * size + 3 * sizes.tokens * sizes.kv_heads * sizes.head_dim * size + turns.numel() * 8
    name = f"turn and keep {sizes.tokens} tokens"
    yield Operation(name=name, call=partial(keep_call, kept()), bytes=moved, check=keep_check)
    # Small weights: what is rounded before a turn may be much larger than what is left of it behind.
    weight = 0.25 + 0.05 * some(sizes.heads + sizes.kv_heads, sizes.head_dim)
    given = NormParameters(weight, 1e-5), some(qkv[0].numel())
    # A bias changes values, too.
    moved += sizes.tokens * sizes.kv_heads * sizes.head_dim * size
    yield Operation(
        name=f"bias, head norm, {name}",
        call=partial(keep_call, kept(given[0]), given[1]),
        bytes=moved,
        check=partial(keep_check, *given),
    )


def _norm_roundings(kernels: Kernels, x: Tensor, norm: NormParameters) -> float:
    return _roundings(kernels.normalise(x, norm), PlainKernels().normalise(x, norm))


def _activation_roundings(kernels: Kernels, x: Tensor, activation: Activation, bias: Tensor) -> float:
    return _roundings(kernels.activate(x, activation, bias), activation(x.double() + bias).to(x.dtype))


def _with_biases(kernels: Kernels, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Operation]:
    """Yield operations that add a bias, or the sum after a product. The rivals are separate operations of PyTorch."""
    plain, size = PlainKernels(), dtype.itemsize

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, added = (some(sizes.tokens, sizes.hidden) for _ in range(2))
    bias, row_norm = some(sizes.hidden), NormParameters(some(sizes.hidden), 1e-5)

    def sum_check() -> float:
        one, other = x.clone(), x.clone()
        normed = kernels.add_normalise(one, added, row_norm, bias), plain.add_normalise(other, added, row_norm, bias)
        return max(_roundings(one, other), _roundings(*normed))

    sum_ = x.clone()
    yield Operation(
        name=f"sum, bias and RMSNorm of {sizes.tokens} x {sizes.hidden}",
        call=lambda: kernels.add_normalise(sum_, added, row_norm, bias),
        bytes=4 * x.numel() * size,
        check=sum_check,
        rival=lambda: plain.normalise(sum_.add_(added).add_(bias), row_norm),
    )
    wide, wide_bias = some(sizes.tokens, sizes.intermediate), some(sizes.intermediate)
    for activation in Activation:
        yield Operation(
            name=f"bias and {activation.name} of {sizes.tokens} x {sizes.intermediate}",
            call=partial(kernels.activate, wide, activation, wide_bias),
            bytes=2 * wide.numel() * size,
            check=partial(_activation_roundings, kernels, wide, activation, wide_bias),
            rival=partial(plain.activate, wide, activation, wide_bias),
        )
    gate_up, gate_bias = some(sizes.tokens, 2 * sizes.intermediate), some(2 * sizes.intermediate)
    yield Operation(
        name=f"biases and silu(gate) * up of {sizes.tokens} x {sizes.intermediate}",
        call=lambda: kernels.gated(gate_up, Activation.SILU, gate_bias),
        bytes=3 * gate_up.numel() // 2 * size,
        check=lambda: _roundings(
            kernels.gated(gate_up, Activation.SILU, gate_bias),
            plain.gated(gate_up.double(), Activation.SILU, gate_bias.double()).to(dtype),
        ),
        rival=lambda: plain.gated(gate_up, Activation.SILU, gate_bias),
    )


def _sampling(rows: int, vocab: int, device: torch.device) -> Iterator[Operation]:
    """Yield sampling from float32 logits. The first rival draws from the same distribution by other random numbers."""
    logits = 2.5 * torch.randn(rows, vocab, device=device)
    lines, indices = (torch.arange(rows, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
    tokens, logprobs = torch.zeros_like(indices), torch.zeros(rows, device=device)
    for name, temperature, top_p in (("temperature", 0.8, 1.0), ("greedy", 0.0, 1.0), ("top-p", 0.8, 0.95)):
        state = SamplingLines(rows, vocab, device)
        for line in range(rows):
            state.put(line, LineSettings(temperature=temperature, top_p=top_p, seed=line))

        def call(state: SamplingLines = state) -> Tensor:
            sample(logits, lines, indices, state, tokens, logprobs)
            return tokens

        def check(state: SamplingLines = state, call: Callable[[], Tensor] = call) -> float:
            expected = sample_reference(logits, lines, indices, state)
            drawn = zip(expected, call().tolist(), strict=True)
            if not all(one is not None and one.allows(token, _SHARE_MARGIN) for one, token in drawn):
                return float("inf")
            return _roundings(logprobs, logits.double().log_softmax(1).gather(1, tokens[:, None])[:, 0].float())

        yield Operation(
            name=f"sampling of {rows} x {vocab}, {name}",
            call=call,
            bytes=logits.numel() * logits.element_size(),
            check=check,
            rival=(lambda: torch.multinomial((logits / 0.8).softmax(1), 1)) if name == "temperature" else None,
        )


def _roundings(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, in units of the last digit of the expected number, or of 1 if that is larger."""
    unit = torch.finfo(other.dtype).eps * other.float().abs().clamp_(min=1.0)
    return float(((one.float() - other.float()).abs() / unit).max())
