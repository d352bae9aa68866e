"""Flags of SGLang's launcher that mean nothing here, so that launch commands work as users have them.

Those without an effect are taken out of the command and named in a notice with the reason. Those that would
make another server of this one are refused unless they say what holds anyway.
Must not know: what the other flags lead to. Called by: serve.
"""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperCommand

from refimpl.cli.flags import tell
from refimpl.config import ConfigError

ONE_PROCESS: Final = "this server is one process on one machine"
KERNELS: Final = "there is one implementation of each operation here"
OTHER_MODELS: Final = "it concerns models or features that are not served here"
NOT_NEEDED: Final = "that is so anyway"
HARDWARE: Final = "no such hardware is used here"

# Flags that are followed by one value, by why they have no effect.
_ONE: Final = {
    ONE_PROCESS: "base-gpu-id gpu-id-step dist-init-addr nccl-port node-rank dist-timeout"
    " tokenizer-worker-num detokenizer-worker-num download-dir watchdog-timeout"
    " soft-watchdog-timeout stream-interval ep-size expert-parallel-size ep",
    "the context is the model's, or what L1 holds": "context-length",
    KERNELS: "attention-backend prefill-attention-backend decode-attention-backend sampling-backend"
    " grammar-backend mm-attention-backend moe-runner-backend moe-a2a-backend fp8-gemm-backend"
    " cuda-graph-max-bs cuda-graph-bs torch-compile-max-bs max-prefill-tokens schedule-policy"
    " schedule-conservativeness num-continuous-decode-steps triton-attention-num-kv-splits"
    " max-loaded-loras page-major-kv-layout radix-cache-backend",
    OTHER_MODELS: "quantization quantization-param-path kv-cache-dtype load-format revision"
    " tokenizer-path tokenizer-mode model-loader-extra-config json-model-override-args"
    " chat-template completion-template tool-call-parser reasoning-parser lora-backend"
    " preferred-sampling-params file-storage-path max-lora-rank mamba-ssm-dtype"
    " speculative-algorithm speculative-draft-model-path"
    " speculative-num-steps speculative-eagle-topk speculative-num-draft-tokens weight-version",
    HARDWARE: "disaggregation-ib-device mooncake-ib-device hicache-host-memory-fraction"
    " numa-node swa-full-tokens-ratio",
    "only a pair of prefill and decode needs it": "disaggregation-bootstrap-port"
    " disaggregation-transfer-backend disaggregation-decode-polling-interval"
    " disaggregation-decode-extra-slots",
    "L3 is asked again at admission, three times at most": "hicache-storage-prefetch-retry-poll-interval"
    " hicache-storage-prefetch-retry-max-attempts",
    "see /metrics and the record": "log-level log-level-http log-requests-level log-requests-format"
    " log-requests-target export-metrics-to-file-dir decode-log-interval crash-dump-folder",
}
# Flags that stand alone.
_ALONE: Final = {
    NOT_NEEDED: "enable-metrics enable-cache-report skip-server-warmup enable-mixed-chunk",
    KERNELS: "disable-cuda-graph disable-cuda-graph-padding enable-torch-compile"
    " disable-overlap-schedule enable-dp-attention enable-dp-lm-head enable-deepep-moe"
    " enable-unified-memory enable-page-major-kv-layout disable-custom-all-reduce enable-nccl-nvls"
    " enable-symm-mem enable-flashinfer-allreduce-fusion enable-two-batch-overlap"
    " enable-deterministic-inference disable-outlines-disk-cache triton-attention-reduce-in-fp32"
    " enable-p2p-check enable-hisparse",
    OTHER_MODELS: "trust-remote-code enable-multimodal skip-tokenizer-init enable-lora"
    " is-embedding enable-memory-saver enable-custom-logit-processor",
    "see /metrics and the record": "log-requests show-time-cost export-metrics-to-file"
    " enable-request-time-stats-logging enable-metrics-for-all-schedulers collect-tokens-histogram",
    HARDWARE: "numa-aware",
}
_NOT_BY_LAYERS: Final = "a model is not split by layers here: leave it at 1"
# Flags that change what a server is: the value that holds here anyway, and what to do otherwise.
_FIXED: Final = {
    "disaggregation-mode": ("null", "this server prefills and decodes: leave it out"),
    "pp-size": ("1", _NOT_BY_LAYERS),
    "pipeline-parallel-size": ("1", _NOT_BY_LAYERS),
    "nnodes": ("1", f"{ONE_PROCESS}: leave it at 1"),
    "hicache-host-memory-mode": ("cache", "L2 is a cache here: leave it at cache"),
    "encoder-transfer-backend": ("auto", "encoders are not served: leave it out"),
}
_REFUSED: Final = {
    "config": "give the flags of that file themselves",
    "encoder-only": "encoders are not served: leave it out",
    "language-only": "encoders are not served: leave it out",
    "encoder-urls": "encoders are not served: leave it out",
    "enable-lmcache": "it excludes HiCache: leave it out",
    "enable-flexkv": "it excludes HiCache: leave it out",
    "enable-unified-cache-external-linker": "L3 is read through L2 here: leave it out",
}


# Other names of flags that this server has.
_RENAMED: Final = {
    "tensor-parallel-size": "tp-size",
    "data-parallel-size": "dp-size",
    "random-seed": "seed",
}


def _by_name(groups: dict[str, str]) -> dict[str, str]:
    return {name: why for why, names in groups.items() for name in names.split()}


WITH_VALUE: Final = _by_name(_ONE)
ALONE: Final = _by_name(_ALONE)


def without_effect(words: list[str]) -> tuple[list[str], list[str]]:
    """The command without what has no effect, and notices that say so. Raises ConfigError."""
    kept: list[str] = []
    notices: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            kept.append(word)
        elif name in ALONE and not equals:
            notices.append(f"--{name} has no effect: {ALONE[name]}")
        elif name in WITH_VALUE:
            _value(name, value if equals else next(rest, None))
            notices.append(f"--{name} has no effect: {WITH_VALUE[name]}")
        elif name in _FIXED:
            _check_fixed(name, _value(name, value if equals else next(rest, None)))
        elif name in _REFUSED:
            raise ConfigError(f"--{name}: {_REFUSED[name]}")
        elif name in _RENAMED:
            kept.append(f"--{_RENAMED[name]}{equals}{value}")
        else:
            kept.append(word)
    return kept, notices


def _value(name: str, value: str | None) -> str:
    if value is None:
        raise ConfigError(f"--{name} requires an argument")
    return value


def _check_fixed(name: str, value: str) -> None:
    wanted, why = _FIXED[name]
    if value != wanted:
        raise ConfigError(f"--{name} {value}: {why}")


class LaunchCommand(TyperCommand):
    """A command that takes the flags of SGLang's launcher."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what is left when flags without effect are out."""
        kept, notices = without_effect(args)
        tell(notices)
        return super().parse_args(ctx, kept)
