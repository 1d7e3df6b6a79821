"""A CPU's matrix units as functions of Numba: Intel's AMX, products of bfloat16 tiles summed in float32.

A tile is 16 rows of 64 bytes and lies in one of eight registers, which are numbered by literals. `multiply_tiles`
takes one factor as it is stored, rows of 32 numbers, and the other one with pairs of its numbers side by side:
16 rows of 16 pairs, pair p of row r at [p, r]. `pack_pairs` converts float32 rows to that.

Strides count float32 numbers or pairs, except those of `load_tile` and `store_tile`, which count bytes. Tiles that
begin at multiples of 64 bytes are read three times as fast.
"""

# Numba calls these functions with other types than Python would
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

TILE = 16  # rows of a tile, and columns of a tile of sums
PAIRS = 16  # pairs of bfloat16 numbers in a row of a factor
ROW = 4 * PAIRS  # bytes in a row
TERMS = 2 * PAIRS  # bfloat16 numbers in a row of a factor
SIZE = TILE * PAIRS  # float32 numbers or pairs in a tile
PARTS = 3  # bfloat16 numbers whose sum is one float32

_BYTE, _WORD, _LONG, _VOID = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.VoidType()
_ANY = _BYTE.as_pointer()
_WORDS, _HALVES = ir.VectorType(_WORD, PAIRS), ir.VectorType(ir.IntType(16), TILE)
_MANY, _MANY_WORDS = ir.VectorType(ir.FloatType(), TERMS), ir.VectorType(_WORD, TERMS)
# interleaves two vectors
_BY_TURNS = ir.Constant(_MANY_WORDS, [index for lane in range(PAIRS) for index in (lane, PAIRS + lane)])


@intrinsic
def configure_tiles(typing: Any) -> Any:
    """Prepare all eight registers for whole tiles, on this thread, until `release_tiles`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        # palette 1; from byte 16 the bytes of a row, from 48 the rows
        halves = [number for byte in range(16, 32, 2) for number in (ROW, 0)]
        content = bytearray([1, *[0] * 15, *halves, *[0] * 16, *[TILE] * 8, *[0] * 8])
        place = builder.alloca(ir.ArrayType(_BYTE, len(content)))
        builder.store(ir.Constant(ir.ArrayType(_BYTE, len(content)), content), place)
        return _call(context, builder, "ldtilecfg", builder.bitcast(place, _ANY))

    return types.void(), generate


@intrinsic
def release_tiles(typing: Any) -> Any:
    """Empty the registers, so that the system need not save them any more."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _call(context, builder, "tilerelease")

    return types.void(), generate


@intrinsic(prefer_literal=True)
def clear_tile(typing: Any, tile: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _call(context, builder, "tilezero", _register(tile))

    return types.void(tile), generate


@intrinsic(prefer_literal=True)
def load_tile(typing: Any, tile: Any, pointer: Any, stride: Any) -> Any:
    """Each row begins `stride` bytes after the one before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _call(context, builder, "tileloadd64", _register(tile), builder.bitcast(values[1], _ANY), values[2])

    return types.void(tile, pointer, types.intp), generate


@intrinsic(prefer_literal=True)
def store_tile(typing: Any, tile: Any, pointer: Any, stride: Any) -> Any:
    """The inverse of `load_tile`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _call(context, builder, "tilestored64", _register(tile), builder.bitcast(values[1], _ANY), values[2])

    return types.void(tile, pointer, types.intp), generate


@intrinsic(prefer_literal=True)
def multiply_tiles(typing: Any, sums: Any, rows: Any, pairs: Any) -> Any:
    """sums [i, j] += the products of row i of `rows` and row j of those packed in `pairs`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _call(context, builder, "tdpbf16ps", *map(_register, (sums, rows, pairs)))

    return types.void(sums, rows, pairs), generate


@intrinsic
def pack_pairs(typing: Any, source: Any, stride: Any, count: Any, to: Any) -> Any:
    """float32 rows of TERMS numbers -> the second factor of `multiply_tiles`, rounded to bfloat16, at `to`.

    There are `count` rows, each `stride` after the one before; if they are fewer than TILE the last one is repeated.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        source, stride, count, to = values
        last = builder.sub(count, ir.Constant(count.type, 1))
        rows = []
        for row in range(TILE):
            number = ir.Constant(count.type, row)
            present = builder.select(builder.icmp_signed("<", number, last), number, last)
            at = builder.gep(source, [builder.mul(present, stride)])
            rows.append(_rounded(builder, builder.load(builder.bitcast(at, _MANY.as_pointer()), align=4)))
        _store_rows(builder, _transposed(builder, rows), to)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, to), generate


@intrinsic
def paired(typing: Any, first: Any, second: Any) -> Any:
    """Two vectors of float32 -> pairs of bfloat16, rounded."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.bitcast(_rounded(builder, builder.shuffle_vector(*values, _BY_TURNS)), values[0].type)

    return first(first, second), generate


@intrinsic
def split_rows(typing: Any, source: Any, stride: Any, to: Any, distance: Any) -> Any:
    """TILE float32 rows of TERMS numbers -> PARTS tiles of bfloat16 that add up to them, `distance` apart.

    Each part takes the upper 8 of the 24 significant bits that are left, so three parts are exact.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        source, stride, to, distance = values
        upper = ir.Constant(_MANY_WORDS, [0xFFFF0000] * TERMS)
        for row in range(TILE):
            left = builder.load(builder.bitcast(source, _MANY.as_pointer()), align=4)
            at = builder.gep(to, [ir.Constant(_LONG, row * PAIRS)])
            for _ in range(PARTS):
                part = builder.bitcast(builder.and_(builder.bitcast(left, _MANY_WORDS), upper), _MANY)
                builder.store(_halves(builder, part), builder.bitcast(at, _WORDS.as_pointer()), align=4)
                left, at = builder.fsub(left, part), builder.gep(at, [distance])
            source = builder.gep(source, [stride])
        return context.get_dummy_value()

    return types.void(source, types.intp, to, types.intp), generate


@intrinsic
def pair_up(typing: Any, first: Any, stride: Any, count: Any, to: Any) -> Any:
    """Two rows of TILE bfloat16 numbers, `stride` apart -> pairs at `to`. There are `count` rows: if fewer than two,
    the missing ones are 0. Returns 0 if all numbers are finite.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        first, stride, count, to = values
        none = ir.Constant(_HALVES, None)
        rows = []
        for row, at in enumerate((first, builder.gep(first, [stride]))):
            stored = builder.load(builder.bitcast(at, _HALVES.as_pointer()), align=2)
            rows.append(builder.select(builder.icmp_signed(">", count, ir.Constant(count.type, row)), stored, none))
        pairs = builder.shuffle_vector(*rows, _BY_TURNS)
        builder.store(builder.bitcast(pairs, _WORDS), builder.bitcast(to, _WORDS.as_pointer()), align=4)
        exponent = ir.Constant(pairs.type, [0x7F80] * TERMS)
        odd = builder.icmp_unsigned("==", builder.and_(pairs, exponent), exponent)
        return builder.zext(builder.bitcast(odd, ir.IntType(TERMS)), _LONG)

    return types.int64(first, types.intp, types.intp, to), generate


@intrinsic
def transpose(typing: Any, source: Any, stride: Any, to: Any, distance: Any) -> Any:
    """A tile of float32 numbers with rows `stride` apart -> its transpose at `to`, with rows `distance` apart."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        source, stride, to, distance = values
        rows = [builder.load(at, align=4) for at in _places(builder, source, stride)]
        for at, row in zip(_places(builder, to, distance), _transposed(builder, rows), strict=True):
            builder.store(row, at, align=4)
        return context.get_dummy_value()

    return types.void(source, types.intp, to, types.intp), generate


def _places(builder: ir.IRBuilder, first: Any, stride: Any) -> Iterator[Any]:
    """Pointers to the begin of each row of a tile."""
    for _ in range(TILE):
        yield builder.bitcast(first, _WORDS.as_pointer())
        first = builder.gep(first, [stride])


def _call(context: Any, builder: ir.IRBuilder, name: str, *arguments: Any) -> Any:
    kind = ir.FunctionType(_VOID, [argument.type for argument in arguments])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), arguments)
    return context.get_dummy_value()


def _register(tile: Any) -> ir.Constant:
    return ir.Constant(_BYTE, tile.literal_value)


def _rounded(builder: ir.IRBuilder, numbers: Any) -> Any:
    """TERMS float32 numbers -> pairs of bfloat16, rounded to nearest even; NaN stays NaN."""

    def same(number: int) -> ir.Constant:
        return ir.Constant(_MANY_WORDS, [number] * TERMS)

    bits = builder.bitcast(numbers, _MANY_WORDS)
    odd = builder.and_(builder.lshr(bits, same(16)), same(1))
    nearest = builder.add(builder.add(bits, odd), same(0x7FFF))
    quiet = builder.or_(bits, same(0x400000))
    return _halves(builder, builder.select(builder.fcmp_unordered("uno", numbers, numbers), quiet, nearest))


def _halves(builder: ir.IRBuilder, numbers: Any) -> Any:
    """The upper 16 bits of TERMS words, side by side."""
    shift = ir.Constant(_MANY_WORDS, [16] * TERMS)
    upper = builder.lshr(builder.bitcast(numbers, _MANY_WORDS), shift)
    return builder.bitcast(builder.trunc(upper, ir.VectorType(ir.IntType(16), TERMS)), _WORDS)


def _transposed(builder: ir.IRBuilder, rows: Sequence[Any]) -> list[Any]:
    """A transposed tile: squares of size 8, 4, 2 and 1 on either side of the diagonal are swapped."""
    rows = list(rows)
    for size in (8, 4, 2, 1):
        upper = ir.Constant(_WORDS, [i if not i & size else PAIRS + i - size for i in range(PAIRS)])
        lower = ir.Constant(_WORDS, [i + size if not i & size else PAIRS + i for i in range(PAIRS)])
        for i in range(TILE):
            if not i & size:
                pair = rows[i], rows[i + size]
                rows[i] = builder.shuffle_vector(*pair, upper)
                rows[i + size] = builder.shuffle_vector(*pair, lower)
    return rows


def _store_rows(builder: ir.IRBuilder, rows: Sequence[Any], to: Any) -> None:
    """Store rows one after another, as a tile lies in memory."""
    at = builder.bitcast(to, _WORDS.as_pointer())
    for number, row in enumerate(rows):
        builder.store(row, builder.gep(at, [ir.Constant(_LONG, number)]), align=4)
