"""Starts SGLang's benchmark client where torch is a build for CPUs.

Run by a Python that has sglang: ``python sglang_benchmark.py --backend sglang …``. Importing sglang imports
torchvision, whose compiled half belongs to a build of torch for CUDA; beside one for CPUs it can't be loaded,
and torchvision then stumbles over two operators of its own. Nobody calls them here, so they are declared.
"""

from __future__ import annotations

import runpy
import sys

import torch

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

if __name__ == "__main__":
    if not torch.cuda.is_available():
        torchvision = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            torchvision.define(name + _BOXES)
    sys.argv[0] = "sglang.benchmark.serving"
    runpy.run_module("sglang.benchmark.serving", run_name="__main__")
