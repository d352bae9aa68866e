"""Copies that Hypothesis draws, and shrinks when one fails."""

from __future__ import annotations

from hypothesis import strategies as st

from cuda_numba import Shape
from scenarios.kernels.case import LAYOUTS, Case


@st.composite
def cases(
    draw: st.DrawFn, *, words_max: int, pages_max: int, heads_max: int, tokens_max: int
) -> Case:
    """Pools of at most ``words_max`` words (or of one page), of any two layouts, MHA or MLA."""
    is_mla = draw(st.booleans())
    shape = Shape(
        layers=draw(st.integers(1, 4)),
        kvs=1 if is_mla else 2,
        heads=1 if is_mla else draw(st.integers(1, heads_max)),
        tokens=draw(st.integers(1, tokens_max)),
        words=draw(st.integers(1, 9)),
    )
    most = max(1, min(pages_max, words_max // shape.total))
    pool_pages = draw(st.integers(1, most))
    count = draw(st.integers(0, pool_pages))
    numbers = st.permutations(range(pool_pages))
    return Case(
        shape,
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(LAYOUTS)),
        pool_pages,
        tuple(draw(numbers)[:count]),
        tuple(draw(numbers)[:count]),
        draw(st.none() | st.integers(0, shape.layers - 1)),
        draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
    )
