"""What numba's loops cannot say: plain pointers, look-ups of 64 codes at once, and the sum of a run.

Pointers are what LLVM makes the best code of: numba's arrays are seven numbers each, count references and wrap indices.
The look-ups are AVX-512's byte permutations (VBMI: Ice Lake, Zen 4 and later), which take 128 bytes of a table: a table
of 256 is two of them and the index's sign bit, one of 256 floats is four planes of bytes. Elsewhere callers loop.
"""

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

RUN = 256  # entries whose squares are summed in registers
GROUP = 64  # codes that are looked up at once
LOOKS_UP = ",+avx512vbmi," in cpu_target.target_context.codegen().magic_tuple()[2]
"""Whether numba compiles for a machine that has the permutations."""

_BYTE, _WORD, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _INTS, _FLOATS = ir.VectorType(_BYTE, GROUP), ir.VectorType(_INT, GROUP // 4), ir.VectorType(_FLOAT, GROUP // 4)


def _memory(builder, address, kind):
    """Memory at an address, as LLVM sees it."""
    return builder.inttoptr(address, kind.as_pointer())


def _read(builder, address, kind, offset=0):
    value = builder.load(_memory(builder, builder.add(address, _LONG(offset)), kind))
    value.align = 1
    return value


def _write(builder, value, address, offset=0):
    builder.store(value, _memory(builder, builder.add(address, _LONG(offset)), value.type)).align = 1


def _shuffled(builder, a, b, order):
    """Elements `order` of `a` and `b`, one behind the other."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(order)), list(order)))


def _table(builder, address):
    """A table of 256 bytes, in four registers."""
    return [_read(builder, address, _BYTES, 64 * n) for n in range(4)]


def _taken(builder, table, index, upper):
    """`table[index]` for 64 bytes; `upper` says which of them are in the table's second half."""
    permute = ir.FunctionType(_BYTES, [_BYTES] * 3)
    function = cgutils.get_or_insert_function(builder.module, permute, "llvm.x86.avx512.vpermi2var.qi.512")
    halves = [builder.call(function, [table[n], index, table[n + 1]]) for n in (0, 2)]
    return builder.select(upper, halves[1], halves[0])


def _negative(builder, x):
    return builder.icmp_signed("<", x, ir.Constant(x.type, None))


def _joined(builder, flags):
    """Four vectors of 16 flags as one of 64."""
    halves = [_shuffled(builder, *flags[n : n + 2], range(32)) for n in (0, 2)]
    return _shuffled(builder, *halves, range(GROUP))


def _woven(builder, a, b, kind):
    """Elements of `a` and `b` in turn, in each 16 bytes: of the lower halves, and of the upper ones."""
    width = kind.width // 8
    number, lane = GROUP // width, 16 // width
    a, b = (builder.bitcast(x, ir.VectorType(kind, number)) for x in (a, b))
    for half in range(2):
        places = [start + half * lane // 2 + n for start in range(0, number, lane) for n in range(lane // 2)]
        order = [place for n in places for place in (n, number + n)]
        yield builder.bitcast(_shuffled(builder, a, b, order), _BYTES)


def _floats_of(builder, planes, codes):
    """The four vectors of 16 floats that 64 codes stand for."""
    # Weaving interleaves 16 bytes of each plane; codes in this order come out in theirs.
    order = [4 * (n % 4) + n // 4 for n in range(16)]
    codes = builder.bitcast(codes, _INTS)
    codes = builder.bitcast(_shuffled(builder, codes, codes, order), _BYTES)
    upper = _negative(builder, codes)
    planes = [_taken(builder, plane, codes, upper) for plane in planes]
    low, high = (list(_woven(builder, *planes[n : n + 2], _BYTE)) for n in (0, 2))
    woven = [x for a, b in zip(low, high, strict=True) for x in _woven(builder, a, b, _WORD)]
    return [builder.bitcast(x, _FLOATS) for x in woven]


def _pointers(kind):
    """An intrinsic that takes an address for a pointer to `kind`; numba has no public cast."""
    pointer = types.CPointer(kind)

    @intrinsic
    def point(typing_context, address):
        def build(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.int64), build

    return point


floats, words, codes_at, integers = map(_pointers, (types.float32, types.uint16, types.uint8, types.int64))
long_words = _pointers(types.uint32)


@intrinsic
def after(typing_context, pointer, number):
    """The pointer to what lies `number` elements after `pointer`."""

    def build(context, builder, signature, args):
        return cgutils.gep(builder, *args)

    return pointer(pointer, types.int64), build


def _address(builder, pointer):
    return builder.ptrtoint(pointer, _LONG)


def _group_at(builder, codes, values, number):
    """Addresses of the codes and of the floats of one group."""
    start = builder.mul(number, _LONG(GROUP))
    return builder.add(codes, start), builder.add(values, builder.mul(start, _LONG(4)))


@intrinsic
def look_up(typing_context, planes, codes, groups, out):
    """`out[j] = table[codes[j]]` for `64 * groups` codes; the table's floats lie in planes of bytes."""

    def build(context, builder, signature, args):
        planes, codes, out = (_address(builder, args[n]) for n in (0, 1, 3))
        tables = [_table(builder, builder.add(planes, _LONG(256 * n))) for n in range(4)]
        with cgutils.for_range(builder, args[2]) as loop:
            where, values = _group_at(builder, codes, out, loop.index)
            for n, found in enumerate(_floats_of(builder, tables, _read(builder, where, _BYTES))):
                _write(builder, found, values, 64 * n)
        return context.get_dummy_value()

    return types.void(planes, codes, types.int64, out), build


@intrinsic
def start_codes(typing_context, starts, codes, groups, x):
    """`codes[j] = starts[x[j] < 0, codes[j]]` for `64 * groups` codes, where -0 is below 0; `starts` is `[2, 256]`."""

    def build(context, builder, signature, args):
        starts, codes, x = (_address(builder, args[n]) for n in (0, 1, 3))
        tables = [_table(builder, builder.add(starts, _LONG(256 * n))) for n in range(2)]
        with cgutils.for_range(builder, args[2]) as loop:
            where, value = _group_at(builder, codes, x, loop.index)
            cell = _read(builder, where, _BYTES)
            found = [_taken(builder, table, cell, _negative(builder, cell)) for table in tables]
            below = _joined(builder, [_negative(builder, _read(builder, value, _INTS, 64 * n)) for n in range(4)])
            _write(builder, builder.select(below, found[1], found[0]), where)
        return context.get_dummy_value()

    return types.void(starts, codes, types.int64, x), build


@intrinsic
def pass_bounds(typing_context, planes, codes, groups, x):
    """`codes[j] += x[j] > table[codes[j]]` for `64 * groups` codes; the table's floats lie in planes of bytes."""

    def build(context, builder, signature, args):
        planes, codes, x = (_address(builder, args[n]) for n in (0, 1, 3))
        tables = [_table(builder, builder.add(planes, _LONG(256 * n))) for n in range(4)]
        with cgutils.for_range(builder, args[2]) as loop:
            where, value = _group_at(builder, codes, x, loop.index)
            group = _read(builder, where, _BYTES)
            bounds = _floats_of(builder, tables, group)
            values = [_read(builder, value, _FLOATS, 64 * n) for n in range(4)]
            above = _joined(builder, [builder.fcmp_ordered(">", *pair) for pair in zip(values, bounds, strict=True)])
            _write(builder, builder.add(group, builder.zext(above, _BYTES)), where)
        return context.get_dummy_value()

    return types.void(planes, codes, types.int64, x), build


@intrinsic
def run_of_squares(typing_context, x):
    """The sum of the squares of `RUN` floats, by the fixed pairwise tree."""

    def build(context, builder, signature, args):
        sums = _read(builder, _address(builder, args[0]), ir.VectorType(_FLOAT, RUN))
        sums = builder.fmul(sums, sums)
        while (count := sums.type.count) > 1:
            halves = [_shuffled(builder, sums, sums, range(first, count, 2)) for first in range(2)]
            sums = builder.fadd(*halves)
        return builder.extract_element(sums, _INT(0))

    return types.float32(x), build
