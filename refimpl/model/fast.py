"""Plain torch arithmetic: as quick as the library is, and different in the last bits by batch shape.

Tolerance: on equal weights and tokens, logits differ from those of ``reference`` by less than
``TOLERANCE`` times the largest of them, by dtype. Measured: on SmolLM2-135M over 1,000 tokens 2e-6 in
float32 and 9e-3 in bfloat16; on the seeded models, whose attention is sharp, 4e-6 and 3e-2, and 3e-3
in float16. scenarios/model/test_arithmetic.py holds it.

Must not know: caches, page tables, layers. Called by: transformer, scenarios.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

TOLERANCE: Final = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


class Fast:
    """The quick implementation of ``Arithmetic``: whole batches, fused attention."""

    name = "fast"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """One product over the whole batch."""
        return functional.linear(x, weight, bias)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """One batched product."""
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """As the library computes it."""
        wide = functional.rms_norm(x.float(), (x.shape[-1],), eps=epsilon)
        return wide.to(x.dtype) * weight

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """As the library computes it."""
        return functional.silu(gate) * up

    def attention(
        self, query: Tensor, keys: Tensor, values: Tensor, *, start: int, scale: float
    ) -> Tensor:
        """Fused attention of one sequence."""
        count = len(query)
        mask = None
        if count > 1 and start:
            seen = torch.arange(len(keys), device=query.device)
            mask = seen <= torch.arange(start, start + count, device=query.device)[:, None]
        result = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],  # [1, head, token, dim]
            keys.transpose(0, 1)[None],  # [1, kv_head, position, dim]
            values.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=count > 1 and not start,
            scale=scale,
            enable_gqa=True,
        )
        return result[0].transpose(0, 1)  # [token, head, value]
