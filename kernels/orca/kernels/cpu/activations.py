"""Functions of float32 scalars and vectors in plain arithmetic: exponential, activations, gates."""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from orca.kernels.contract.activation import Activation
from orca.kernels.cpu.team.intrinsics import constant, emit_fma, load_vector, type_like


def _call(builder: Any, name: str, x: Any) -> Any:
    """Emit a call of LLVM's own float32 function."""
    name = f"llvm.{name}.v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else f"llvm.{name}.f32"
    kind = ir.FunctionType(x.type, [x.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])


def _exp(builder: Any, x: Any) -> Any:
    """Emit e ** x (`exp`). The polynomial is that of Cephes' expf."""
    is_small = builder.fcmp_ordered("<", x, constant(x.type, -87.0))
    x = builder.select(is_small, constant(x.type, -87.0), x)
    turns = _call(builder, "floor", emit_fma(builder, x, constant(x.type, 1.4426950408889634), constant(x.type, 0.5)))
    rest = emit_fma(builder, turns, constant(x.type, -0.693359375), x)
    rest = emit_fma(builder, turns, constant(x.type, 2.12194440e-4), rest)
    sum_ = constant(x.type, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        sum_ = emit_fma(builder, sum_, rest, constant(x.type, factor))
    power = emit_fma(builder, builder.fmul(sum_, rest), rest, builder.fadd(rest, constant(x.type, 1.0)))
    word = type_like(ir.IntType(32), x)
    exponent = builder.add(builder.fptosi(turns, word), constant(word, 127))
    scaled = builder.fmul(power, builder.bitcast(builder.shl(exponent, constant(word, 23)), x.type))
    return builder.select(is_small, constant(x.type, 0.0), scaled)


@intrinsic  # type: ignore[untyped-decorator]
def exp(_typing: Any, x: Any) -> Any:
    """Return e ** x in float32 for x <= 0, with an error of at most 2 ulp; 1 at 0, and 0 below -87.

    Unlike math.exp it is plain arithmetic, which LLVM can vectorize.
    """

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _exp(builder, values[0])

    return types.float32(types.float32), generate


def _share(builder: Any, x: Any, of: Any) -> Any:
    """Emit x / (1 + e^-of), computed from e^-|of|, which cannot overflow."""
    one = constant(x.type, 1.0)
    small = _exp(builder, builder.fneg(_call(builder, "fabs", of)))
    share = builder.select(builder.fcmp_ordered(">=", of, constant(x.type, 0.0)), one, small)
    return builder.fdiv(builder.fmul(x, share), builder.fadd(one, small))


def _relu(builder: Any, x: Any) -> Any:
    """Emit max(x, 0); NaN stays NaN."""
    zero = constant(x.type, 0.0)
    return builder.select(builder.fcmp_ordered("<", x, zero), zero, x)


def _gelu(builder: Any, x: Any) -> Any:
    """Emit GELU.

    The tail of the normal distribution beyond |x| is erfc(|x| / sqrt(2)) / 2, by formula 7.1.26 of Abramowitz and
    Stegun, Handbook of Mathematical Functions, 1964; the error is at most 1.5e-7.
    """
    one, far = constant(x.type, 1.0), _call(builder, "fabs", x)
    near = builder.fdiv(one, builder.fadd(one, builder.fmul(far, constant(x.type, 0.3275911 / math.sqrt(2.0)))))
    sum_ = constant(x.type, 1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        sum_ = builder.fadd(builder.fmul(sum_, near), constant(x.type, factor))
    bell = _exp(builder, builder.fmul(builder.fmul(far, far), constant(x.type, -0.5)))
    beyond = builder.fmul(builder.fmul(builder.fmul(sum_, near), bell), constant(x.type, 0.5))
    is_above = builder.fcmp_ordered(">", x, constant(x.type, 0.0))
    return builder.fmul(x, builder.select(is_above, builder.fsub(one, beyond), beyond))


def _gelu_tanh(builder: Any, x: Any) -> Any:
    """Emit x (1 + tanh(z)) / 2 = x / (1 + e^-2z) with z = sqrt(2 / pi) (x + 0.044715 x^3)."""
    factor = 2.0 * math.sqrt(2.0 / math.pi)
    cubic = builder.fmul(builder.fmul(x, x), constant(x.type, 0.044715 * factor))
    return _share(builder, x, builder.fmul(x, builder.fadd(cubic, constant(x.type, factor))))


def _quick_gelu(builder: Any, x: Any) -> Any:
    return _share(builder, x, builder.fmul(x, constant(x.type, 1.702)))


def _silu(builder: Any, x: Any) -> Any:
    return _share(builder, x, x)


_ACTIVATIONS = {
    Activation.RELU: _relu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.QUICK_GELU: _quick_gelu,
    Activation.SILU: _silu,
}


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def activate_lanes(_typing: Any, numbers: Any, activation: Any, lanes: Any) -> Any:
    """Apply an activation, given by its number, in place to float32 [2 x lanes] at an address."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        places = 0, lanes.literal_value
        xs = [load_vector(builder, values[0], place, types.float32, lanes.literal_value) for place in places]
        end = builder.append_basic_block("end")
        switch = builder.switch(values[1], end)
        for each, activated in _ACTIVATIONS.items():
            block = builder.append_basic_block(each.name)
            switch.add_case(ir.IntType(64)(each.value), block)
            builder.position_at_end(block)
            for x, place in zip(xs, places, strict=True):
                y, at = activated(builder, x), builder.add(values[0], ir.IntType(64)(4 * place))
                builder.store(y, builder.inttoptr(at, y.type.as_pointer()), align=4)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(numbers, activation, lanes), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def activation_of(_typing: Any, x: Any, activation: Any) -> Any:
    """Apply an activation, whose number is a compile-time constant, to x in float32."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _ACTIVATIONS[Activation(activation.literal_value)](builder, values[0])

    return types.float32(types.float32, activation), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def gate_lanes(_typing: Any, numbers: Any, activation: Any, lanes: Any) -> Any:
    """Replace the first half of float32 [2 x lanes] at an address by activation(first half) * second half.

    Args: activation: its number.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        gate, up = (
            load_vector(builder, values[0], place, types.float32, lanes.literal_value)
            for place in (0, lanes.literal_value)
        )
        end = builder.append_basic_block("end")
        switch = builder.switch(values[1], end)
        for each, activated in _ACTIVATIONS.items():
            block = builder.append_basic_block(each.name)
            switch.add_case(ir.IntType(64)(each.value), block)
            builder.position_at_end(block)
            gated = builder.fmul(activated(builder, gate), up)
            builder.store(gated, builder.inttoptr(values[0], gated.type.as_pointer()), align=4)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(numbers, activation, lanes), generate
