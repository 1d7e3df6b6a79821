"""Vector registers as a type of Numba's: loads, stores and arithmetic of LANES float32 numbers at once.

LLVM vectorizes loops by itself only where it can prove that this is safe; these functions ask for it explicitly.
Numbers lie behind pointers, which unlike arrays cost nothing to pass on; no index is checked.
"""

# Numba calls these functions with other types than Python would
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

LONG = get_host_cpu_features().get("avx512f", False)  # 32 registers of 16 float32; without it 16 of 8 are assumed
LANES = WIDEST if LONG else WIDEST // 2  # float32 numbers of a vector
COLUMNS = 2 * LANES  # of a block of sums that stay in registers
ROWS = 8 if LONG else 4  # of such a block
LINE = 64  # bytes of a cache line
SEGMENT = 4  # float32 numbers of the part of a register within which shuffles are fast

_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(f"float32x{LANES}")


class _Block(types.Type):
    """Some rows of `across` vectors each. A block of a few rows stays in registers."""

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
    """Pointer to the number with this index in the flattened array, which must be C-contiguous."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.gep(context.make_array(signature.args[0])(context, builder, values[0]).data, [values[1]])

    return types.CPointer(array.dtype)(array, types.intp), generate


@intrinsic
def shifted(typing: Any, pointer: Any, count: Any) -> Any:
    """The pointer, `count` numbers further."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _at(builder, *values[:2])

    return pointer(pointer, types.intp), generate


@intrinsic
def numbers_of_line(typing: Any, pointer: Any) -> Any:
    """How many numbers of the pointer's type a cache line holds."""
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
    """Request the cache line of pointer[index] from memory. The address need not be valid: nothing is read."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _prefetch(builder, _at(builder, *values[:2]))
        return context.get_dummy_value()

    return types.void(pointer, types.intp), generate


@intrinsic(prefer_literal=True)
def prefetch_rows(typing: Any, count: Any, pointer: Any, stride: Any) -> Any:
    """The same for `count` rows (a literal), each `stride` after the one before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        for at in _rows(builder, *values[1:], signature.args[0].literal_value):
            _prefetch(builder, at)
        return context.get_dummy_value()

    return types.void(count, pointer, types.intp), generate


@intrinsic
def prefetch_columns(typing: Any, pointer: Any, index: Any) -> Any:
    """Request the cache lines of pointer[index : index + COLUMNS] from memory."""

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
    """The larger one, lane by lane; the right one where either is NaN."""
    return _vector(left, right), lambda _, builder, __, values: _larger(builder, *values)


@intrinsic
def exponential(typing: Any, vector: Any, shift: Any) -> Any:
    """exp(vector - shift), lane by lane, where the difference is <= 0; within 2 units of the last place, 0 below -87.

    x = n ln 2 + r with ln 2 in two parts (Cody & Waite 1980), and the Taylor series of exp(r) to the seventh power.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _exponential(builder, builder.fsub(values[0], _spread(builder, values[1])))

    return _vector(vector, types.float32), generate


@intrinsic
def silu(typing: Any, vector: Any) -> Any:
    """x / (1 + exp(-x)), lane by lane, computed from exp(-|x|), which cannot overflow."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        (x,) = values
        negative = builder.or_(builder.bitcast(x, _WORDS), ir.Constant(_WORDS, [0x80000000] * LANES))
        shrunk = _exponential(builder, builder.bitcast(negative, _FLOATS))
        numerator = builder.select(builder.fcmp_ordered("<", x, _number(0.0)), builder.fmul(x, shrunk), x)
        return builder.fdiv(numerator, builder.fadd(_number(1.0), shrunk))

    return _vector(vector), generate


@intrinsic
def rounded(typing: Any, vector: Any) -> Any:
    """Rounded to bfloat16, to nearest even, as float32; NaN stays NaN."""

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
    """The lanes' sum: halves are added until one lane is left."""
    return types.float32(vector), lambda _, builder, __, values: _reduced(builder, values[0], builder.fadd)


@intrinsic
def horizontal_largest(typing: Any, vector: Any) -> Any:
    """The largest lane: halves are compared until one lane is left."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _reduced(builder, values[0], lambda low, high: _larger(builder, low, high))

    return types.float32(vector), generate


@intrinsic
def zeros(typing: Any) -> Any:
    return _vector(), lambda *_: ir.Constant(_FLOATS, None)


@intrinsic(prefer_literal=True)
def load_block(typing: Any, rows: Any, pointer: Any, stride: Any) -> Any:
    """`rows` (a literal) of COLUMNS float32, each `stride` after the one before."""

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
    """Zeros: `rows` of `across` vectors, both literals."""

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
    """Store the sum of each vector's lanes: those of a row `between` apart, rows `stride` apart."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        for place, sum_ in _placed_sums(builder, signature.args[3], *values):
            builder.store(sum_, place)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, types.intp, block), generate


@intrinsic
def add_sums(typing: Any, pointer: Any, stride: Any, between: Any, block: Any) -> Any:
    """Add the sums to what is there instead."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        for place, sum_ in _placed_sums(builder, signature.args[3], *values):
            builder.store(builder.fadd(builder.load(place), sum_), place)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, types.intp, block), generate


def _placed_sums(builder: ir.IRBuilder, kind: _Block, first: Any, stride: Any, between: Any, block: Any) -> Any:
    """Pairs of a place and the sum of a vector's lanes that goes there."""
    sums = _sums(builder, [builder.extract_value(block, part) for part in range(kind.rows * kind.across)])
    for row in _rows(builder, first, stride, kind.rows):
        yield from zip(_rows(builder, row, between, kind.across), sums, strict=False)


def _at(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    return builder.gep(pointer, [index])


def _load(builder: ir.IRBuilder, at: Any, kind: Any) -> Any:
    """As `load`, from a pointer of this type."""
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
    """exp(x) for x <= 0, as `exponential` says."""
    bounded = _larger(builder, _number(-87.0), x)  # NaN stays NaN
    # float32 as large as this are integers: the sum's lowest bits are n plus the exponent's bias
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
    """The sum of each vector's lanes, added in the order of `_reduced`: two vectors are halved into one at a time,
    until each lane is the sum of one vector."""
    # vectors, and what each lane holds: (number of the vector that is summed, which of its `width` partial sums)
    partial = [(vector, [(owner, part) for part in range(LANES)]) for owner, vector in enumerate(vectors)]
    width = LANES
    while width > 1:
        width //= 2
        pairs = zip(partial[::2], [*partial[1::2], partial[-1]], strict=False)
        partial = [_halved(builder, left, right, width) for left, right in pairs]
    places = {owner: (vector, lane) for vector, held in reversed(partial) for lane, (owner, _) in enumerate(held)}
    for owner in range(len(vectors)):
        vector, lane = places[owner]
        yield builder.extract_element(vector, ir.Constant(ir.IntType(32), lane))


def _halved(builder: ir.IRBuilder, left: Any, right: Any, width: int) -> Any:
    """Two vectors of `_sums` -> one: partial sums from `width` on are added to the first ones."""
    held = [*left[1], *right[1]]
    low = [lane for lane, (_, part) in enumerate(held) if part < width]
    if width < SEGMENT:  # numbers that stay in their segment of a register move faster
        low.sort(key=lambda lane: lane % LANES // SEGMENT)
    high = [held.index((held[lane][0], held[lane][1] + width), lane // LANES * LANES) for lane in low]
    halves = (ir.Constant(_WORDS, lanes) for lanes in (low, high))
    sums = builder.fadd(*(builder.shuffle_vector(left[0], right[0], lanes) for lanes in halves))
    return sums, [held[lane] for lane in low]


def _with_products(builder: ir.IRBuilder, block: Any, row: int, factor: Any, vectors: Sequence[Any]) -> Any:
    """The block with factor * vectors added to one row."""
    for part, vector in enumerate(vectors, row * len(vectors)):
        block = builder.insert_value(block, _fused(builder, factor, vector, builder.extract_value(block, part)), part)
    return block


def _parts(builder: ir.IRBuilder, first: Any, stride: Any, block: _Block) -> Iterator[Any]:
    """Pointers to each vector of a block."""
    for at in _rows(builder, first, stride, block.rows):
        for lane in (0, LANES):
            yield builder.bitcast(_at(builder, at, ir.Constant(stride.type, lane)), _FLOATS.as_pointer())


def _rows(builder: ir.IRBuilder, first: Any, stride: Any, rows: int) -> Iterator[Any]:
    """Pointers to the begin of each row."""
    for _ in range(rows):
        yield first
        first = _at(builder, first, stride)
