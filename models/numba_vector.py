"""Sixteen float32 at once as a type of Numba's: loads, stores and fused multiply-adds of whole vector registers.

LLVM makes such code of loops by itself only where it can prove much about them; here it is said outright, for any
CPU: on one whose registers are shorter a vector takes several. Knows nothing about attention.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from dcpjax.models.numba_here import LANES

_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__("float32x16")


_vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, _FLOATS)


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """array[index : index + LANES] as float32. uint16 holds bfloat16, the upper half of a float32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        pointer = _pointer(context, builder, signature, values)
        if signature.args[0].dtype == types.float32:
            return builder.load(builder.bitcast(pointer, _FLOATS.as_pointer()), align=4)
        halves = ir.VectorType(ir.IntType(16), LANES)
        bits = builder.zext(builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2), _WORDS)
        return builder.bitcast(builder.shl(bits, ir.Constant(_WORDS, [16] * LANES)), _FLOATS)

    return _vector(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, index: Any, vector: Any) -> Any:
    """array[index : index + LANES] = vector, of a float32 array."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        pointer = _pointer(context, builder, signature, values)
        builder.store(values[2], builder.bitcast(pointer, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@intrinsic
def zeros(typing: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return ir.Constant(_FLOATS, None)

    return _vector(), generate


@intrinsic
def multiply_add_vectors(typing: Any, left: Any, right: Any, addend: Any) -> Any:
    """left * right + addend, lane by lane, rounded once where the CPU can."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        fused = ["contract"]
        return builder.fadd(builder.fmul(values[0], values[1], flags=fused), values[2], flags=fused)

    return _vector(left, right, addend), generate


@intrinsic
def horizontal_sum(typing: Any, vector: Any) -> Any:
    """The lanes' sum: halves are added until one is left."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _reduced(builder, values[0], builder.fadd)

    return types.float32(vector), generate


@intrinsic
def multiply_add(typing: Any, factors: Any, index: Any, vector: Any, addend: Any) -> Any:
    """factors[index] * vector + addend, rounded once where the CPU can. The index is not checked, nor from the end."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        lane, fused = ir.Constant(ir.IntType(32), 0), ["contract"]
        factor = builder.load(_pointer(context, builder, signature, values))
        single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), factor, lane)
        spread = builder.shuffle_vector(single, single, ir.Constant(_WORDS, [0] * LANES))
        return builder.fadd(builder.fmul(spread, values[2], flags=fused), values[3], flags=fused)

    return _vector(factors, types.intp, vector, addend), generate


@intrinsic
def larger(typing: Any, left: Any, right: Any) -> Any:
    """Lane by lane the larger one, the right one where either is NaN."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", values[0], values[1]), values[0], values[1])

    return _vector(left, right), generate


@intrinsic
def horizontal_largest(typing: Any, vector: Any) -> Any:
    """The largest lane: halves are compared until one is left."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        def reduce(low: Any, high: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", low, high), low, high)

        return _reduced(builder, values[0], reduce)

    return types.float32(vector), generate


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], of any index: nothing is read."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        read, near, data = (ir.Constant(word, number) for number in (0, 1, 1))
        builder.call(function, [builder.bitcast(_pointer(context, builder, signature, values), byte), read, near, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _pointer(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, values[0])
    return builder.gep(array.data, [values[1]])


def _reduced(builder: ir.IRBuilder, lanes: Any, combine: Any) -> Any:
    word = ir.IntType(32)
    for half in (8, 4, 2, 1):
        kind = ir.VectorType(word, half)
        low, high = (ir.Constant(kind, list(range(first, first + half))) for first in (0, half))
        lanes = combine(builder.shuffle_vector(lanes, lanes, low), builder.shuffle_vector(lanes, lanes, high))
    return builder.extract_element(lanes, ir.Constant(word, 0))
