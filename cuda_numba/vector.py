"""One streaming access of 16 or 8 bytes in a kernel, and what stands for it in the simulator.

`.cs` marks a line as one that is not read again, so that a copy of pages leaves the caches to
whatever else runs. numba offers it for 8 bytes at most, LLVM ignores its own hint on this target,
and two plain accesses of 8 bytes are never merged: hence PTX.

Nothing tells the compiler what these touch: a kernel must not access the same arrays in any other
way. Indices are words; bounds are not checked, and negative ones are not counted from the end.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import config, types
from numba.cuda.extending import intrinsic

_WORD = ir.IntType(64)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def _assemble(builder: Any, kind: Any, code: str, constraints: str, operands: list[Any]) -> Any:
    """A line of PTX that the compiler neither drops nor repeats.

    Marked convergent, which keeps the compiler from unrolling the loop around it: for sm_100 it made
    four copies of a loop that is unrolled by hand already.
    """
    call = builder.asm(kind, code, constraints, operands, side_effect=True)
    call.attributes.add("convergent")
    return call


if config.ENABLE_CUDASIM:

    def load_pair(words, at):
        """Two words: one read."""
        return words[at], words[at + 1]

    def store_pair(words, at, pair):
        """Two words: one write."""
        words[at], words[at + 1] = pair

    def load_word(words, at):
        """One word: one read."""
        return words[at]

    def store_word(words, at, word):
        """One word: one write."""
        words[at] = word

    def as_integer(word):
        """A word as Python's integer: those of NumPy warn when a product wraps."""
        return int(word)

else:

    @intrinsic
    def load_pair(typing_context, words, at):
        """Two words in one read of 16 bytes; ``words[at]`` must lie on a multiple of 16."""

        def lower(context, builder, signature, values):
            address = _pointer(context, builder, signature.args[0], *values)
            pair = ir.LiteralStructType([_WORD, _WORD])
            kind = ir.FunctionType(pair, [address.type])
            code = "ld.global.cs.v2.u64 {$0, $1}, [$2];"
            read = _assemble(builder, kind, code, "=l,=l,l", [address])
            both = [builder.extract_value(read, 0), builder.extract_value(read, 1)]
            return context.make_tuple(builder, signature.return_type, both)

        return types.UniTuple(types.uint64, 2)(words, types.int64), lower

    @intrinsic
    def store_pair(typing_context, words, at, pair):
        """Two words in one write of 16 bytes; ``words[at]`` must lie on a multiple of 16."""

        def lower(context, builder, signature, values):
            address = _pointer(context, builder, signature.args[0], *values[:2])
            kind = ir.FunctionType(ir.VoidType(), [address.type, _WORD, _WORD])
            both = [builder.extract_value(values[2], 0), builder.extract_value(values[2], 1)]
            code = "st.global.cs.v2.u64 [$0], {$1, $2};"
            _assemble(builder, kind, code, "l,l,l", [address, *both])
            return context.get_dummy_value()

        return types.void(words, types.int64, types.UniTuple(types.uint64, 2)), lower

    @intrinsic
    def load_word(typing_context, words, at):
        """One word in one read of 8 bytes."""

        def lower(context, builder, signature, values):
            address = _pointer(context, builder, signature.args[0], *values)
            kind = ir.FunctionType(_WORD, [address.type])
            code = "ld.global.cs.u64 $0, [$1];"
            return _assemble(builder, kind, code, "=l,l", [address])

        return types.uint64(words, types.int64), lower

    @intrinsic
    def store_word(typing_context, words, at, word):
        """One word in one write of 8 bytes."""

        def lower(context, builder, signature, values):
            address = _pointer(context, builder, signature.args[0], *values[:2])
            kind = ir.FunctionType(ir.VoidType(), [address.type, _WORD])
            code = "st.global.cs.u64 [$0], $1;"
            _assemble(builder, kind, code, "l,l", [address, values[2]])
            return context.get_dummy_value()

        return types.void(words, types.int64, types.uint64), lower

    @intrinsic
    def as_integer(typing_context, word):
        """A word as an integer without a sign."""

        def lower(context, builder, signature, values):
            return values[0]

        return types.uint64(types.uint64), lower
