"""SGLang's own benchmark client against this server: no request fails, and the figures are sane."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

from refimpl.run.options import Options
from scenarios.serve.served import serving_null

PYTHON = os.environ.get("SGLANG_PYTHON", "")
CLIENT = Path(__file__).with_name("sglang_benchmark.py")
SECONDS_MAX = 110

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not PYTHON or shutil.which(PYTHON) is None,
        reason="tox -e sglang-client installs that client; SGLANG_PYTHON names a Python that has it",
    ),
]
OPTIONS = Options(enable_hierarchical_cache=True)
RANDOM = ("--random-input-len", "64", "--random-output-len", "8", "--random-range-ratio", "1")
SHARED = (
    *("--gsp-num-groups", "2", "--gsp-prompts-per-group", "4", "--gsp-system-prompt-len", "128"),
    *("--gsp-question-len", "16", "--gsp-output-len", "8"),
)
BYTE_LEVEL = """
import sys
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
vocab = {letter: at for at, letter in enumerate(sorted(ByteLevel.alphabet()))}
made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
made.save(sys.argv[1])
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes, which no hub has to be asked for."""
    folder = tmp_path_factory.mktemp("tokenizer")
    subprocess.run([PYTHON, "-c", BYTE_LEVEL, folder / "tokenizer.json"], check=True, timeout=60)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 100_000,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def benchmark(backend: str, data: str, words: tuple[str, ...], tokenizer: Path) -> dict[str, Any]:
    """What the client measured."""
    output = tokenizer / f"{backend}-{data}.jsonl"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    with serving_null(OPTIONS) as (url, service):
        command = [PYTHON, str(CLIENT), "--backend", backend, "--base-url", url]
        command += ["--dataset-name", data, "--num-prompts", "20", *words]
        command += ["--tokenizer", str(tokenizer), "--model", service.name]
        command += ["--cache-report", "--flush-cache", "--output-file", str(output)]
        done = subprocess.run(
            command,
            env=environment,
            cwd=tokenizer,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    measured: dict[str, Any] = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    return measured


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sglang", "sglang-oai-chat"])
def test_random_ids_are_served(backend: str, tokenizer: Path) -> None:
    measured = benchmark(backend, "random-ids", RANDOM, tokenizer)
    assert measured["completed"] == 20
    assert measured["total_output_tokens"] == 20 * 8
    assert 0 < measured["mean_ttft_ms"] < measured["mean_e2e_latency_ms"]
    assert measured["mean_itl_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sglang", "sglang-oai-chat"])
def test_shared_prefixes_are_found_and_told(backend: str, tokenizer: Path) -> None:
    measured = benchmark(backend, "generated-shared-prefix", SHARED, tokenizer)
    assert measured["completed"] == 8
    assert measured["total_output_tokens"] == 8 * 8
    # Two groups of four: the first of each computes the prefix, of two pages at least.
    cached = measured["cache_report"]
    assert cached["total_cached_tokens"] >= 6 * 64
    assert cached["device_cached_tokens"] == cached["total_cached_tokens"]
