"""The pages that backends are tried with: layouts, GQA and MLA, sizes that divide nothing evenly.

Must not know: backends, tensors. Called by: subject, rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from refimpl.storage.names import Identity

ITEM_BYTES: Final = 2  # all are bfloat16: a store sees bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """A page, and how its bytes lie in the pool. MLA has ``kvs=1``."""

    layout: str = "page_first"
    layers: int = 2
    kvs: int = 2
    heads: int = 2
    dim: int = 16
    page_size: int = 4  # tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        tokens = self.kvs * self.layers * self.heads * self.dim * ITEM_BYTES
        return tokens * self.page_size

    @property
    def pieces(self) -> int:
        """Contiguous runs that a page consists of (spec 3)."""
        return self.kvs * self.layers if self.layout == "layer_first" else self.kvs

    @property
    def label(self) -> str:
        """For messages."""
        kind = "MLA" if self.kvs == 1 else "GQA"
        return f"{kind} {self.layout}, {self.page_bytes} bytes in {self.pieces} pieces"

    def identity(self, model: str) -> Identity:
        """Whose pages these are."""
        return Identity(
            model=model,
            layout=self.layout,
            page_size=self.page_size,
            layers=self.layers,
            kv_heads=self.heads,
            head_dim=self.dim,
            is_mla=self.kvs == 1,
        )


SMALL: Final = Shape()  # 1 KiB
MEDIUM: Final = Shape(layers=8, heads=4, dim=64, page_size=8)  # 64 KiB: torn copies show
_GQA: Final = tuple(
    Shape(layout, layers=3, heads=4, dim=20, page_size=5)
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
)
_MLA: Final = tuple(
    Shape(layout, layers=5, kvs=1, heads=1, dim=36, page_size=7)
    for layout in ("layer_first", "page_first", "page_first_direct")
)
_EXTREMES: Final = (
    Shape(layers=1, kvs=1, heads=1, dim=4, page_size=1),  # 8 bytes
    Shape(layers=16, heads=8, dim=64, page_size=64),  # 2 MiB
)
SHAPES: Final = (*_GQA, *_MLA, *_EXTREMES)
VALUE_BYTES: Final = (1, 7, 4095, 4096, 4097, (1 << 20) + 1)  # around blocks of a disk

# What tells namespaces apart, a change each; the last two only where names are ours.
STRANGERS: Final[tuple[tuple[str, dict[str, object]], ...]] = (
    ("another model", {"model": "another"}),
    ("another rank", {"tp_rank": 1}),
    ("other weights", {"weights": "2"}),
    ("another data type", {"dtype": "float16"}),
)
STRANGERS_OF_SGLANG: Final = STRANGERS[:2]


def changed(identity: Identity, changes: dict[str, object]) -> Identity:
    """An identity with fields changed; a model's name keeps what marks this run."""
    model = changes.get("model")
    renamed = {"model": f"{identity.model}-{model}"} if model else {}
    return msgspec.structs.replace(identity, **{**changes, **renamed})
