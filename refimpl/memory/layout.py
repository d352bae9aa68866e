"""How pages lie in a pool: a layout is an order of axes, hence shapes and strides, and nothing else.

Must not know: tensors, devices, policies. Called by: pool, transfer, hands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cuda_numba import Shape, Strides
from refimpl.config import ConfigError, require, require_choice

ITEM_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
WORD_BYTES: Final = 8  # what the kernels count in

# The axes of a pool, outermost first. A slot of tokens and its page are two axes that follow each
# other wherever SGLang writes one token axis (spec 3), which is the same memory.
AXES: Final = {
    "layer_first": ("kv", "layer", "page", "token", "head", "dim"),
    "page_first": ("kv", "page", "token", "layer", "head", "dim"),
    "page_first_direct": ("kv", "page", "layer", "token", "head", "dim"),
    "page_head": ("kv", "page", "head", "token", "layer", "dim"),
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a page of one rank holds. MLA has ``kvs=1, heads=1`` and the latent width as ``dim``."""

    layers: int
    kvs: int  # 2 for K and V, 1 for MLA
    heads: int
    dim: int
    page_size: int  # tokens
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        require_choice("the KV data type", self.dtype, tuple(ITEM_BYTES))
        for name in ("layers", "kvs", "heads", "dim", "page_size"):
            require(getattr(self, name) >= 1, f"{name} of a pool must be at least 1")
        require(
            self.dim * ITEM_BYTES[self.dtype] % WORD_BYTES == 0,
            f"a head of {self.dim} {self.dtype} values is no multiple of {WORD_BYTES} bytes",
        )

    @property
    def is_mla(self) -> bool:
        """True for a latent cache."""
        return self.kvs == 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * self.kvs * self.heads * self.dim * ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.token_bytes * self.page_size

    @property
    def words(self) -> Shape:
        """What a page holds, in 8-byte words, as the kernels want it."""
        words = self.dim * ITEM_BYTES[self.dtype] // WORD_BYTES
        return Shape(self.layers, self.kvs, self.heads, self.page_size, words)

    def sizes(self, pages: int) -> dict[str, int]:
        """Length of each axis of a pool of ``pages`` pages."""
        return {
            "kv": self.kvs,
            "layer": self.layers,
            "page": pages,
            "token": self.page_size,
            "head": self.heads,
            "dim": self.dim,
        }


def axes_of(layout: str, geometry: Geometry) -> tuple[str, ...]:
    """The axes of a layout, outermost first; raises ConfigError where nothing serves it."""
    require_choice("--hicache-mem-layout", layout, tuple(AXES))
    if layout == "page_head" and geometry.is_mla:
        raise ConfigError("--hicache-mem-layout page_head has no heads to put first in an MLA pool")
    return AXES[layout]


def shape_of(layout: str, geometry: Geometry, pages: int) -> tuple[int, ...]:
    """Shape of the tensor that is a pool."""
    sizes = geometry.sizes(pages)
    return tuple(sizes[axis] for axis in axes_of(layout, geometry))


def strides_of(layout: str, geometry: Geometry, pages: int) -> Strides:
    """Strides of a pool in words, as the kernels want them."""
    sizes = geometry.sizes(pages) | {"dim": geometry.words.words}
    step, strides = 1, {}
    for axis in reversed(axes_of(layout, geometry)):
        strides[axis] = step
        step *= sizes[axis]
    return Strides(
        strides["page"], strides["layer"], strides["kv"], strides["head"], strides["token"]
    )
