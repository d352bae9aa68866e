"""What a decoder computes with: five operations, of which there are two implementations.

``reference`` gives a token the same bits in whatever company it is computed, ``fast`` does not.
Everything else a decoder does (embedding, rotation, residual sums) is exact per element and needs no
choice. Must not know: caches, page tables, layers. Called by: transformer.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Arithmetic(Protocol):
    """The operations. Leading axis: tokens of the batch, of any sequences; results likewise."""

    name: str

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [token, in]`` times ``weight [out, in]``, plus ``bias [out]``: ``[token, out]``."""
        ...

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Each head its own matrix: ``[token, head, in]`` × ``[head, in, out]``."""
        ...

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMSNorm over the last axis, in float32: ``[..., dim]``, ``weight [dim]``."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up`` in float32, element by element."""
        ...

    def attention(
        self, query: Tensor, keys: Tensor, values: Tensor, *, start: int, scale: float
    ) -> Tensor:
        """Causal attention of one sequence; queries stand at ``start``, ``start + 1`` and so on.

        ``query [token, head, dim]``, ``keys [start + token, kv_head, dim]``, ``values [start + token,
        kv_head, value]``; head ``h`` reads KV head ``h // (heads / kv_heads)``. Returns
        ``[token, head, value]`` in the dtype of ``query``.
        """
        ...
