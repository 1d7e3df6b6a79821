"""As many float32 as a register holds as a type of Numba's: loads, stores and arithmetic of whole vector registers.

LLVM makes such code of loops by itself only where it can prove much about them; here it is said outright. Numbers lie
behind pointers, which unlike arrays cost nothing to hand over; no index is checked. Knows nothing about attention.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from dcpjax.models.kernels.cpu.support import WIDEST

LONG = get_host_cpu_features().get("avx512f", False)  # 32 registers of 16 float32; elsewhere 16 of 8 are counted on
LANES = WIDEST if LONG else WIDEST // 2  # float32 numbers that are taken at once
COLUMNS = 2 * LANES  # of sums, which stay in registers
ROWS = 8 if LONG else 4  # of so many columns
LINE = 64  # bytes of the cache
SEGMENT = 4  # float32 numbers of a register's part that shuffles need not leave

_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(f"float32x{LANES}")


class _Block(types.Type):
    """Rows of some vectors each, two by default. A block of a few rows stays in registers."""

    def __init__(self, rows: int, across: int = 2) -> None:
        super().__init__(f"float32x{LANES}[{rows}, {across}]")
        self.rows, self.across = rows, across


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, _FLOATS)


@register_model(_Block)
class _BlockModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: _Block) -> None:
        super().__init__(manager, kind, ir.ArrayType(_FLOATS, kind.rows * kind.across))


_vector = _Vector()


@intrinsic
def pointer(typing: Any, array: Any, index: Any) -> Any:
    """Where the number lies that has this index in the C-contiguous array laid out flat."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.gep(context.make_array(signature.args[0])(context, builder, values[0]).data, [values[1]])

    return types.CPointer(array.dtype)(array, types.intp), generate


@intrinsic
def shifted(typing: Any, pointer: Any, count: Any) -> Any:
    """So many numbers further."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _at(builder, *values[:2])

    return pointer(pointer, types.intp), generate


@intrinsic
def numbers_of_line(typing: Any, pointer: Any) -> Any:
    """How many such numbers a cache line holds."""
    count = LINE * 8 // pointer.dtype.bitwidth
    return types.intp(pointer), lambda *_: ir.Constant(ir.IntType(64), count)


@intrinsic
def load(typing: Any, pointer: Any, index: Any) -> Any:
    """pointer[index : index + LANES] as float32. uint16 holds bfloat16, the upper half of a float32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _load(builder, _at(builder, *values[:2]), signature.args[0])

    return _vector(pointer, types.intp), generate


@intrinsic
def store(typing: Any, pointer: Any, index: Any, vector: Any) -> Any:
    """pointer[index : index + LANES] = vector, of float32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        at = _at(builder, *values[:2])
        builder.store(values[2], builder.bitcast(at, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, vector), generate


@intrinsic
def prefetch(typing: Any, pointer: Any, index: Any) -> Any:
    """Ask for the cache line of pointer[index], wherever that is: nothing is read."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _prefetch(builder, _at(builder, *values[:2]))
        return context.get_dummy_value()

    return types.void(pointer, types.intp), generate


@intrinsic(prefer_literal=True)
def prefetch_rows(typing: Any, count: Any, pointer: Any, stride: Any) -> Any:
    """The same of so many rows, each `stride` after the one before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        for at in _rows(builder, *values[1:], signature.args[0].literal_value):
            _prefetch(builder, at)
        return context.get_dummy_value()

    return types.void(count, pointer, types.intp), generate


@intrinsic
def prefetch_columns(typing: Any, pointer: Any, index: Any) -> Any:
    """Ask for the cache lines of pointer[index : index + COLUMNS]."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        at = _at(builder, *values[:2])
        for lane in range(0, COLUMNS, LINE * 8 // signature.args[0].dtype.bitwidth):
            _prefetch(builder, _at(builder, at, ir.Constant(ir.IntType(64), lane)))
        return context.get_dummy_value()

    return types.void(pointer, types.intp), generate


@intrinsic
def spread(typing: Any, number: Any) -> Any:
    """The number in all lanes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _spread(builder, values[0])

    return _vector(types.float32), generate


@intrinsic
def add(typing: Any, left: Any, right: Any) -> Any:
    return _vector(left, right), lambda _, builder, __, values: builder.fadd(*values)


@intrinsic
def multiply(typing: Any, left: Any, right: Any) -> Any:
    return _vector(left, right), lambda _, builder, __, values: builder.fmul(*values)


@intrinsic
def multiply_add(typing: Any, left: Any, right: Any, addend: Any) -> Any:
    """left * right + addend, lane by lane, rounded once where the CPU can."""
    return _vector(left, right, addend), lambda _, builder, __, values: _fused(builder, *values)


@intrinsic
def larger(typing: Any, left: Any, right: Any) -> Any:
    """Lane by lane the larger one, the right one where either is NaN."""
    return _vector(left, right), lambda _, builder, __, values: _larger(builder, *values)


@intrinsic
def exponential(typing: Any, vector: Any, shift: Any) -> Any:
    """exp(vector - shift) where that is <= 0, lane by lane; within 2 units of the last place, 0 below -87.

    x = n ln 2 + r with ln 2 in two parts (Cody & Waite 1980), and the Taylor series of exp(r) to the seventh power.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _exponential(builder, builder.fsub(values[0], _spread(builder, values[1])))

    return _vector(vector, types.float32), generate


@intrinsic
def silu(typing: Any, vector: Any) -> Any:
    """x / (1 + exp(-x)), lane by lane, with the exponential of what is not positive."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        (x,) = values
        negative = builder.or_(builder.bitcast(x, _WORDS), ir.Constant(_WORDS, [0x80000000] * LANES))
        shrunk = _exponential(builder, builder.bitcast(negative, _FLOATS))
        numerator = builder.select(builder.fcmp_ordered("<", x, _number(0.0)), builder.fmul(x, shrunk), x)
        return builder.fdiv(numerator, builder.fadd(_number(1.0), shrunk))

    return _vector(vector), generate


@intrinsic
def rounded(typing: Any, vector: Any) -> Any:
    """The nearest bfloat16 numbers, of two as near the even one, as float32; NaN stays NaN."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        def same(number: int) -> ir.Constant:
            return ir.Constant(_WORDS, [number] * LANES)

        bits = builder.bitcast(values[0], _WORDS)
        odd = builder.and_(builder.lshr(bits, same(16)), same(1))
        nearest = builder.add(builder.add(bits, odd), same(0x7FFF))
        quiet = builder.or_(bits, same(0x400000))
        nearest = builder.select(builder.fcmp_unordered("uno", values[0], values[0]), quiet, nearest)
        return builder.bitcast(builder.and_(nearest, same(0xFFFF0000)), _FLOATS)

    return _vector(vector), generate


@intrinsic
def horizontal_sum(typing: Any, vector: Any) -> Any:
    """The lanes' sum: halves are added until one is left."""
    return types.float32(vector), lambda _, builder, __, values: _reduced(builder, values[0], builder.fadd)


@intrinsic
def horizontal_largest(typing: Any, vector: Any) -> Any:
    """The largest lane: halves are compared until one is left."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _reduced(builder, values[0], lambda low, high: _larger(builder, low, high))

    return types.float32(vector), generate


@intrinsic
def zeros(typing: Any) -> Any:
    return _vector(), lambda *_: ir.Constant(_FLOATS, None)


@intrinsic(prefer_literal=True)
def load_block(typing: Any, rows: Any, pointer: Any, stride: Any) -> Any:
    """So many rows of float32: each begins `stride` after the one before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        block = ir.Constant(context.get_value_type(signature.return_type), ir.Undefined)
        for part, at in enumerate(_parts(builder, *values[1:], signature.return_type)):
            block = builder.insert_value(block, builder.load(at, align=4), part)
        return block

    return _Block(rows.literal_value)(rows, pointer, types.intp), generate


@intrinsic
def store_block(typing: Any, pointer: Any, stride: Any, block: Any) -> Any:
    """The inverse of `load_block`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        for part, at in enumerate(_parts(builder, *values[:2], signature.args[2])):
            builder.store(builder.extract_value(values[2], part), at, align=4)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, block), generate


@intrinsic(prefer_literal=True)
def zeros_block(typing: Any, rows: Any, across: Any) -> Any:
    """So many rows of so many vectors."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return ir.Constant(context.get_value_type(signature.return_type), None)

    return _Block(rows.literal_value, across.literal_value)(rows, across), generate


@intrinsic
def add_products(typing: Any, block: Any, factors: Any, index: Any, stride: Any, left: Any, right: Any) -> Any:
    """block[row] + factors[index + row * stride] * (left, right), each rounded once where the CPU can."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        block, factors, index, stride, *vectors = values
        for row, at in enumerate(_rows(builder, _at(builder, factors, index), stride, signature.args[0].rows)):
            block = _with_products(builder, block, row, _spread(builder, builder.load(at)), vectors)
        return block

    return block(block, factors, types.intp, types.intp, left, right), generate


@intrinsic
def add_lanes(typing: Any, block: Any, left: Any, stride: Any, right: Any, between: Any) -> Any:
    """block[row, column] + the vector at left[row * stride] * that at right[column * between], each rounded once."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        kind, lefts, _, rights, _ = signature.args
        block, left, stride, right, between = values
        columns = [_load(builder, at, rights) for at in _rows(builder, right, between, kind.across)]
        for row, at in enumerate(_rows(builder, left, stride, kind.rows)):
            block = _with_products(builder, block, row, _load(builder, at, lefts), columns)
        return block

    return block(block, left, types.intp, right, types.intp), generate


@intrinsic
def store_sums(typing: Any, pointer: Any, stride: Any, between: Any, block: Any) -> Any:
    """The sum of each vector's lanes: rows `stride` apart, of a row's vectors `between`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        for place, sum_ in _placed_sums(builder, signature.args[3], *values):
            builder.store(sum_, place)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, types.intp, block), generate


@intrinsic
def add_sums(typing: Any, pointer: Any, stride: Any, between: Any, block: Any) -> Any:
    """The same, added to what is there."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        for place, sum_ in _placed_sums(builder, signature.args[3], *values):
            builder.store(builder.fadd(builder.load(place), sum_), place)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, types.intp, block), generate


def _placed_sums(builder: ir.IRBuilder, kind: _Block, first: Any, stride: Any, between: Any, block: Any) -> Any:
    """Where the sum of each vector's lanes goes, and the sum."""
    sums = _sums(builder, [builder.extract_value(block, part) for part in range(kind.rows * kind.across)])
    for row in _rows(builder, first, stride, kind.rows):
        yield from zip(_rows(builder, row, between, kind.across), sums, strict=False)


def _at(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    return builder.gep(pointer, [index])


def _load(builder: ir.IRBuilder, at: Any, kind: Any) -> Any:
    """As `load`, from a pointer of this kind."""
    if kind.dtype == types.float32:
        return builder.load(builder.bitcast(at, _FLOATS.as_pointer()), align=4)
    halves = ir.VectorType(ir.IntType(16), LANES)
    bits = builder.zext(builder.load(builder.bitcast(at, halves.as_pointer()), align=2), _WORDS)
    return builder.bitcast(builder.shl(bits, ir.Constant(_WORDS, [16] * LANES)), _FLOATS)


def _prefetch(builder: ir.IRBuilder, at: Any) -> None:
    word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    read, near, data = (ir.Constant(word, number) for number in (0, 1, 1))
    builder.call(function, [builder.bitcast(at, byte), read, near, data])


def _number(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [value] * LANES)


def _spread(builder: ir.IRBuilder, number: Any) -> Any:
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, single, ir.Constant(_WORDS, [0] * LANES))


def _fused(builder: ir.IRBuilder, left: Any, right: Any, addend: Any) -> Any:
    return builder.fadd(builder.fmul(left, right, flags=["contract"]), addend, flags=["contract"])


def _exponential(builder: ir.IRBuilder, x: Any) -> Any:
    """exp(x) where that is <= 0, as `exponential` says."""
    bounded = _larger(builder, _number(-87.0), x)  # NaN stays what it is
    # a sum as large as this has no room for fractions: n and the exponent's bias are its lowest bits
    large = _number(1.5 * 2.0**23 + 127)
    sum_ = _fused(builder, bounded, _number(math.log2(math.e)), large)
    n = builder.fsub(sum_, large)
    r = _fused(builder, n, _number(2.12194440e-4), _fused(builder, n, _number(-0.693359375), bounded))
    series = _number(1 / math.factorial(7))
    for power in (6, 5, 4, 3, 2, 1, 0):
        series = _fused(builder, series, r, _number(1 / math.factorial(power)))
    power_of_two = builder.shl(builder.bitcast(sum_, _WORDS), ir.Constant(_WORDS, [23] * LANES))
    value = builder.fmul(series, builder.bitcast(power_of_two, _FLOATS))
    return builder.select(builder.fcmp_ordered("<", x, _number(-87.0)), _number(0.0), value)


def _larger(builder: ir.IRBuilder, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _reduced(builder: ir.IRBuilder, lanes: Any, combine: Any) -> Any:
    word, half = ir.IntType(32), LANES
    while half > 1:
        half //= 2
        kind = ir.VectorType(word, half)
        low, high = (ir.Constant(kind, list(range(first, first + half))) for first in (0, half))
        lanes = combine(builder.shuffle_vector(lanes, lanes, low), builder.shuffle_vector(lanes, lanes, high))
    return builder.extract_element(lanes, ir.Constant(word, 0))


def _sums(builder: ir.IRBuilder, vectors: Sequence[Any]) -> Iterator[Any]:
    """The sum of each one's lanes, added as `_reduced` does: halves of two vectors at a time, until each lane of a
    vector is the sum of another."""
    # of each vector what its lanes hold: a part of whose sum, and which one of `width` parts
    made = [(vector, [(owner, part) for part in range(LANES)]) for owner, vector in enumerate(vectors)]
    width = LANES
    while width > 1:
        width //= 2
        pairs = zip(made[::2], [*made[1::2], made[-1]], strict=False)
        made = [_halved(builder, left, right, width) for left, right in pairs]
    places = {owner: (vector, lane) for vector, held in reversed(made) for lane, (owner, _) in enumerate(held)}
    for owner in range(len(vectors)):
        vector, lane = places[owner]
        yield builder.extract_element(vector, ir.Constant(ir.IntType(32), lane))


def _halved(builder: ir.IRBuilder, left: Any, right: Any, width: int) -> Any:
    """Two vectors of `_sums` -> one, in which the parts from `width` on were added to the first ones."""
    held = [*left[1], *right[1]]
    low = [lane for lane, (_, part) in enumerate(held) if part < width]
    if width < SEGMENT:  # numbers that stay in their quarter or half of a register move faster
        low.sort(key=lambda lane: lane % LANES // SEGMENT)
    high = [held.index((held[lane][0], held[lane][1] + width), lane // LANES * LANES) for lane in low]
    halves = (ir.Constant(_WORDS, lanes) for lanes in (low, high))
    sums = builder.fadd(*(builder.shuffle_vector(left[0], right[0], lanes) for lanes in halves))
    return sums, [held[lane] for lane in low]


def _with_products(builder: ir.IRBuilder, block: Any, row: int, factor: Any, vectors: Sequence[Any]) -> Any:
    """block[row] + the factor times each of the row's vectors."""
    for part, vector in enumerate(vectors, row * len(vectors)):
        block = builder.insert_value(block, _fused(builder, factor, vector, builder.extract_value(block, part)), part)
    return block


def _parts(builder: ir.IRBuilder, first: Any, stride: Any, block: _Block) -> Iterator[Any]:
    """Where each vector of a block lies."""
    for at in _rows(builder, first, stride, block.rows):
        for lane in (0, LANES):
            yield builder.bitcast(_at(builder, at, ir.Constant(stride.type, lane)), _FLOATS.as_pointer())


def _rows(builder: ir.IRBuilder, first: Any, stride: Any, rows: int) -> Iterator[Any]:
    """Where each row begins."""
    for _ in range(rows):
        yield first
        first = _at(builder, first, stride)
