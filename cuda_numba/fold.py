"""From the axes of a page to the fewest loops around the longest run. Host side, integers only.

A layout is nothing but strides: no function below knows one by name. Called by `pages`, `heads` and
`checksum` before either backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cuda_numba.index import Sizes, Steps


class LayoutError(ValueError):
    """Strides, shapes, arrays or page lists that a copy can't be made of; says what to change."""


class Shape(NamedTuple):
    """What a page holds. ``words`` is the run of one token in one layer and head, 8 bytes each.

    A layout that keeps the heads of a token together may pass ``heads=1`` and longer runs; MLA has
    ``kvs=1`` and ``heads=1``.
    """

    layers: int
    kvs: int
    heads: int
    tokens: int
    words: int

    @property
    def total(self) -> int:
        """Words of a page over all layers."""
        return self.layers * self.kvs * self.heads * self.tokens * self.words


class Strides(NamedTuple):
    """Distance in words between neighbours along each axis; ``base`` is where the pool begins."""

    page: int
    layer: int
    kv: int
    head: int
    token: int
    base: int = 0


class _Axis(NamedTuple):
    size: int
    to: int
    fro: int


@dataclass(frozen=True)
class Nest:
    """``sizes`` loops over two sides. A page of either side spans ``reach`` words from its base."""

    sizes: Sizes
    to: Steps
    fro: Steps
    reach_to: int
    reach_fro: int

    @property
    def rows_a_page(self) -> int:
        return self.sizes[0] * self.sizes[1] * self.sizes[2]

    @property
    def words_a_page(self) -> int:
        return self.rows_a_page * self.sizes[3] * self.sizes[4]


def canonical(shape: Shape) -> Strides:
    """Order that checksums count words in: kv, layer, token, head. Of a page, so its page is 0.

    With heads folded into longer runs the order stays the same.
    """
    token = shape.heads * shape.words
    layer = shape.tokens * token
    return Strides(0, layer, shape.layers * layer, shape.words, token)


def compact(shape: Shape) -> Strides:
    """Strides of a buffer that holds whole pages in canonical order and nothing between them."""
    return canonical(shape)._replace(page=shape.total)


@lru_cache(maxsize=1024)  # an engine copies between two pools all its life
def fold(
    shape: Shape, to: Strides, fro: Strides, layer: int | None = None, *, far_inside: bool = False
) -> Nest:
    """The loops that visit every word of a page once, on both sides.

    Axes that continue the run on both sides lengthen it; axes that continue each other become one;
    the loops go in the order in which src lies. ``far_inside`` puts the axis that jumps farthest on
    either side innermost, layers as a rule: each far place is then a stream that moves on. For a CPU
    that stores past its caches this is level to 60 % faster, as measured on an EPYC, where the order
    of src is up to 4 times as fast as that of dst.
    """
    _check(shape, to, fro, layer)
    first = layer or 0
    axes = [
        _Axis(shape.kvs, to.kv, fro.kv),
        _Axis(1 if layer is not None else shape.layers, to.layer, fro.layer),
        _Axis(shape.heads, to.head, fro.head),
        _Axis(shape.tokens, to.token, fro.token),
    ]
    farthest = max(axes[1:], key=_distance)
    run, axes = _lengthen(shape.words, [axis for axis in axes if axis.size > 1])
    reach_to = run + sum((axis.size - 1) * axis.to for axis in axes)
    reach_fro = run + sum((axis.size - 1) * axis.fro for axis in axes)
    axes.sort(key=lambda axis: (far_inside and axis is farthest, -axis.fro))
    axes = _join(axes)
    one, two, three, four = [_Axis(1, 0, 0)] * (4 - len(axes)) + axes
    return Nest(
        (one.size, two.size, three.size, four.size, run),
        (to.base + first * to.layer, to.page, one.to, two.to, three.to, four.to),
        (fro.base + first * fro.layer, fro.page, one.fro, two.fro, three.fro, four.fro),
        reach_to,
        reach_fro,
    )


def _distance(axis: _Axis) -> int:
    """How far apart neighbours along an axis are, at most; of one there are none."""
    return max(axis.to, axis.fro) if axis.size > 1 else 0


def cut_run(nest: Nest, words_max: int, items_min: int) -> Nest:
    """The same words with a long run cut into equal items, where there are fewer than ``items_min``.

    A run that has no divisor up to ``words_max`` stays whole, and so does one below four loops.
    """
    outer, (items, run) = nest.sizes[:3], nest.sizes[3:]
    if run <= words_max or items >= items_min or (items > 1 and outer[0] > 1):
        return nest
    piece = next((n for n in range(words_max, 1, -1) if run % n == 0 and n % 2 == run % 2), run)
    if piece == run:
        return nest
    to, fro = nest.to, nest.fro
    if items > 1:  # the first loop is none: move the others up
        outer, to, fro = (*outer[1:], items), (*to[:2], *to[3:], 0), (*fro[:2], *fro[3:], 0)
    return Nest(
        (*outer, run // piece, piece),
        (*to[:5], piece),
        (*fro[:5], piece),
        nest.reach_to,
        nest.reach_fro,
    )


def _lengthen(run: int, axes: list[_Axis]) -> tuple[int, list[_Axis]]:
    while inner := next((axis for axis in axes if axis.to == run == axis.fro), None):
        axes = [axis for axis in axes if axis is not inner]
        run *= inner.size
    return run, axes


def _join(axes: list[_Axis]) -> list[_Axis]:
    """Neighbours of which the outer one only continues the inner one become one loop."""
    joined: list[_Axis] = []
    for axis in axes:
        outer = joined[-1] if joined else None
        if outer and (outer.to, outer.fro) == (axis.size * axis.to, axis.size * axis.fro):
            joined[-1] = _Axis(outer.size * axis.size, axis.to, axis.fro)
        else:
            joined.append(axis)
    return joined


def _check(shape: Shape, to: Strides, fro: Strides, layer: int | None) -> None:
    for name, size in shape._asdict().items():
        if size < 1:
            raise LayoutError(
                f"shape.{name} is {size}: every axis of a page has at least one entry"
            )
    if layer is not None and not 0 <= layer < shape.layers:
        raise LayoutError(f"layer {layer} is not one of the {shape.layers} layers of the shape")
    for side, strides in (("dst", to), ("src", fro)):
        for name, stride in strides._asdict().items():
            if stride < 0:
                raise LayoutError(f"{side}: the {name} stride is {stride}; strides are counted up")


def check_apart(shape: Shape, to: Strides, pages: int) -> None:
    """Refuse strides that put two words of the first ``pages`` pages into one place."""
    sizes = (pages, shape.layers, shape.kvs, shape.heads, shape.tokens)
    axes = sorted(zip(to[:5], sizes, to._fields[:5], strict=True))
    reached = shape.words
    for stride, size, name in axes:
        if size > 1 and stride < reached:
            raise LayoutError(
                f"dst: the {name} stride is {stride} words, but what it steps over has {reached}"
            )
        reached = stride * (size - 1) + reached
