"""Time for AIBrix on a machine whose cores are shared. No tensors here: its users may do without."""

from __future__ import annotations

# It gives a token 20 ms by itself; a call that times out is a failure, and right to be told of.
PATIENCE = ("AIBRIX_KV_CACHE_OL_L2_CACHE_PER_TOKEN_TIMEOUT_MS", "2000")
