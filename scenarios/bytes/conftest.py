"""Torch on one thread: workers of pytest-xdist share the cores already."""

from __future__ import annotations

try:
    import torch
except ImportError:  # the files here are skipped, each with its reason
    pass
else:
    torch.set_num_threads(1)
