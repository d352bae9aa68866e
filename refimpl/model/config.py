"""The numbers that shape a decoder, and the two small models that need no download.

Must not know: tensors, files, caches. Called by: every file of this package, and by whoever sizes a
KV pool for a model (``cached_heads``, ``key_width``, ``value_width``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from refimpl.config import require, require_choice

DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class MlaDims:
    """Widths of multi-head latent attention. A token caches ``latent + rope`` numbers a layer."""

    latent: int  # the compressed keys and values
    rope: int  # the part of a key that carries its position, shared by all heads; even
    nope: int  # the part of a head's query and key that carries none
    value: int  # what a head puts out


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder of the Llama family: RMSNorm, rotary positions, SwiGLU.

    With ``mla`` the fields ``kv_heads`` and ``head_dim`` describe the expanded heads and are not
    what is cached. Raises ConfigError on numbers that don't fit together.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions_max: int
    rope_theta: float = 10_000.0
    rope_divisors: tuple[float, ...] = ()  # one a frequency; what Llama 3's rope scaling comes to
    norm_epsilon: float = 1e-5
    ties_embeddings: bool = False  # the output layer is the embedding
    has_qkv_bias: bool = False  # Qwen2
    has_output_bias: bool = False  # of attention: Llama with attention_bias
    has_qk_norm: bool = False  # Qwen3
    mla: MlaDims | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, DTYPES)
        sizes = [self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim]
        sizes += [self.intermediate, self.vocab, self.positions_max]
        require(min(sizes) >= 1, f"{self.name}: sizes of a model must be at least 1, not {sizes}")
        require(
            self.heads % self.kv_heads == 0,
            f"{self.name}: {self.heads} heads can't share {self.kv_heads} KV heads evenly",
        )
        require(self.rope_width % 2 == 0, f"{self.name}: rotary width {self.rope_width} is odd")
        require(
            len(self.rope_divisors) in (0, self.rope_width // 2),
            f"{self.name}: {len(self.rope_divisors)} rope divisors for width {self.rope_width}",
        )

    @property
    def rope_width(self) -> int:
        """Numbers of a head that are rotated by position."""
        return self.mla.rope if self.mla else self.head_dim

    @property
    def query_width(self) -> int:
        """Numbers of a head's query as it is projected."""
        return self.mla.nope + self.mla.rope if self.mla else self.head_dim

    @property
    def cached_heads(self) -> int:
        """Heads axis of a KV pool."""
        return 1 if self.mla else self.kv_heads

    @property
    def key_width(self) -> int:
        """Last axis of the pool of keys."""
        return self.mla.latent + self.mla.rope if self.mla else self.head_dim

    @property
    def value_width(self) -> int:
        """Last axis of the pool of values; 0 with MLA, whose values are the latents of the keys."""
        return 0 if self.mla else self.head_dim


def llama3_divisors(
    theta: float, width: int, scaling: Mapping[str, float | int]
) -> tuple[float, ...]:
    """What Llama 3.1's rope scaling divides each inverse frequency by.

    Wavelengths below ``original / high_freq_factor`` stay, those above ``original /
    low_freq_factor`` are stretched by ``factor``, and in between the inverse frequency is blended.
    Raises KeyError when ``scaling`` lacks one of its four numbers.
    """
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    divisors = []
    for i in range(width // 2):
        turns = original / (2 * math.pi * theta ** (2 * i / width))  # in the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / (kept + (1 - kept) / factor))
    return tuple(divisors)


# Small enough to be instant, odd enough to be honest: widths that fill no vector evenly, a vocabulary
# of bytes and two specials (see tokenizer.py), more than one KV head.
TINY_GQA: Final = ModelConfig(
    name="tiny-gqa", layers=3, hidden=48, heads=4, kv_heads=2, head_dim=12, intermediate=100,
    vocab=258, positions_max=4096,
)  # fmt: skip
TINY_MLA: Final = ModelConfig(
    name="tiny-mla", layers=3, hidden=48, heads=4, kv_heads=4, head_dim=20, intermediate=100,
    vocab=258, positions_max=4096, mla=MlaDims(latent=24, rope=8, nope=12, value=16),
)  # fmt: skip
