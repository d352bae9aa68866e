"""The constants of the cost model: devices, models and L3 stores, each with where it comes from.

Origins are one of: *datasheet* (the vendor's figure), *arithmetic*, *measured* by the public source
named beside it, or *assumed* (a round guess that nobody has measured; replace it when you can).
Units: bytes, bytes per second, nanoseconds, percent; GB is 1e9 bytes.
Must not know: requests, caches, how a cost is put together. Called by: cost, and the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from refimpl.config import require, require_choice
from refimpl.units import GB, NS_PER_MS, NS_PER_US

TERA: Final = 10**12
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device, its link to host memory, and the host. Rates are those of one device."""

    name: str
    flops_per_s: int  # dense BF16
    flops_percent: int  # share of it that a prefill reaches
    hbm_bytes: int
    hbm_bytes_per_s: int
    hbm_percent: int  # share of it that a decode reaches
    link_up_bytes_per_s: int  # host -> device, by the copy engine
    link_down_bytes_per_s: int  # device -> host, by the copy engine
    peer_bytes_per_s: int  # device -> device, one direction
    # Copies. See kernel_link_percent below: the copy kernels get a share of the engine's rate.
    kernel_link_percent: int = (
        82  # measured, vLLM blog, H100: 68.5 against 83.4 GB/s, both ways busy
    )
    head_rows_percent: int = 90  # assumed: page_head moves rows of one head, 2 PCIe lines each
    piece_ns: int = 6 * NS_PER_US  # measured, DualPath (arXiv 2602.21548, 5.2): 5-7 us a copy call
    batched_piece_ns: int = NS_PER_US  # assumed: a copy inside one cuMemcpyBatchAsync call
    kernel_launch_ns: int = 6_400  # measured, sglang #25154: one row, JIT kernel, 6.4 us
    # Forward passes.
    prefill_launch_ns: int = 2 * NS_PER_MS  # assumed: schedule, build the batch, sample
    step_launch_ns: int = 300 * NS_PER_US  # assumed: the same for a decode step replayed as a graph
    all_reduce_ns: int = 10 * NS_PER_US  # assumed: latency of one, without its bytes
    # Host.
    host_bytes: int = 2048 * GB  # assumed: a server of eight devices with 2 TB
    host_copy_bytes_per_s: int = 10 * GB  # measured: copy_ by one CPU thread, 8-10 GB/s
    ranks_per_host: int = 8


_LINK_GEN5: Final = (
    50 * GB
)  # measured, vLLM blog, H100: about 50 GB/s one way, of 63.0 by arithmetic

HARDWARE: Final = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            name="h200",
            flops_per_s=989_500_000_000_000,  # datasheet: 1,979 TFLOPS with sparsity, halved
            flops_percent=65,  # measured share of FlashAttention-3 (up to 740 TFLOPS = 75%), less
            # an assumed tenth for what isn't matrix work
            hbm_bytes=141 * GB,  # datasheet
            hbm_bytes_per_s=4_800 * GB,  # datasheet
            hbm_percent=87,  # measured, sglang #19103: a tuned kernel reached 4.2 of 4.8 TB/s
            link_up_bytes_per_s=_LINK_GEN5,
            link_down_bytes_per_s=_LINK_GEN5,
            peer_bytes_per_s=450 * GB,  # datasheet: NVLink 4, 900 GB/s both ways
        ),
        Hardware(
            name="h100",
            flops_per_s=989_500_000_000_000,  # datasheet: as h200
            flops_percent=65,  # as h200
            hbm_bytes=80 * GB,  # datasheet, SXM
            hbm_bytes_per_s=3_350 * GB,  # datasheet, SXM
            hbm_percent=87,  # assumed: as h200
            link_up_bytes_per_s=_LINK_GEN5,
            link_down_bytes_per_s=_LINK_GEN5,
            peer_bytes_per_s=450 * GB,  # datasheet
        ),
        Hardware(
            name="h20",
            flops_per_s=148 * TERA,  # datasheet
            flops_percent=88,  # measured, gahow/agentic-kvc: 64k tokens of Qwen3-Coder-30B-A3B in
            # 15.2 s is 87-91% by the FLOPs counted here; so few FLOPs are easily kept busy
            hbm_bytes=96 * GB,  # datasheet
            hbm_bytes_per_s=4_000 * GB,  # datasheet
            hbm_percent=87,  # assumed: as h200
            link_up_bytes_per_s=54 * GB,  # measured, gahow/agentic-kvc: about 54 GB/s
            link_down_bytes_per_s=46 * GB,  # measured, FlexKV README: 30-46 GB/s
            peer_bytes_per_s=450 * GB,  # datasheet
        ),
        Hardware(
            name="a100",
            flops_per_s=312 * TERA,  # datasheet
            flops_percent=65,  # measured share of FlashAttention-2 (up to 230 TFLOPS = 73%), less
            # an assumed tenth
            hbm_bytes=80 * GB,  # datasheet, SXM
            hbm_bytes_per_s=2_039 * GB,  # datasheet, SXM
            hbm_percent=87,  # assumed: as h200
            link_up_bytes_per_s=26_300_000_000,  # measured, flashinfer #4870: a PCIe 4 hop
            link_down_bytes_per_s=26_300_000_000,
            peer_bytes_per_s=300 * GB,  # datasheet: NVLink 3, 600 GB/s both ways
            host_bytes=1024 * GB,  # assumed
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer by its dimensions (from its published config.json) and parameter counts.

    ``kv_lora_rank`` above 0 makes it an MLA model: one latent of ``kv_lora_rank + rope_dim`` a
    token and layer, the same on every rank. ``active_params`` below ``params`` makes it sparse.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # of a query and key
    intermediate: int
    vocab: int
    params: int
    active_params: int = 0  # 0: all
    value_dim: int = 0  # 0: head_dim
    kv_lora_rank: int = 0
    rope_dim: int = 0
    weight_bytes: int = 2  # of one parameter
    kv_bytes: int = 2  # of one element of KV

    @property
    def is_mla(self) -> bool:
        """True when the cache holds one latent instead of keys and values."""
        return self.kv_lora_rank > 0

    @property
    def pieces(self) -> int:
        """Buffers a layer has: K and V, or the latent."""
        return 1 if self.is_mla else 2


MODELS: Final = {
    model.name: model
    for model in (
        Model("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8_030_261_248),
        Model("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256, 70_553_706_496),
        Model("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 8_190_735_360),
        Model("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, 32_762_123_264),
        Model(
            "deepseek-r1",
            layers=61,
            hidden=7168,
            heads=128,
            kv_heads=128,
            head_dim=192,
            intermediate=18432,
            vocab=129280,
            params=671_000_000_000,  # paper: 671B
            active_params=37_000_000_000,  # paper: 37B
            value_dim=128,
            kv_lora_rank=512,
            rope_dim=64,
            weight_bytes=1,  # FP8; computed at the BF16 rate here, so prefill is an upper bound
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Storage:
    """An L3 store as one rank sees it while the other ranks of its host use it too.

    A call carries up to 128 pages; ``page_ns`` is what each page adds beside its bytes.
    """

    name: str
    read_bytes_per_s: int
    write_bytes_per_s: int
    call_ns: int
    page_ns: int
    probe_call_ns: int
    probe_key_ns: int
    open_ns: int = 20 * NS_PER_MS  # measured, Mooncake client setup on loopback: 0.02 s
    close_ns: int = 20 * NS_PER_MS  # assumed: as open


_PROBE_CALL: Final = 89 * NS_PER_US  # measured, Mooncake is_exist on loopback
_PROBE_KEY: Final = 2_100  # measured, Mooncake batch_is_exist: 384 keys in 0.8 ms
_NIC_SHARE: Final = 87 * GB // 8  # measured, FAST'25: 87 GB/s on 4 x 200G, shared by 8 ranks

STORAGES: Final = {
    storage.name: storage
    for storage in (
        Storage(
            "memory",
            read_bytes_per_s=10 * GB,  # measured: copy_ by one CPU thread, 8-10 GB/s
            write_bytes_per_s=10 * GB,
            call_ns=20 * NS_PER_US,  # assumed
            page_ns=NS_PER_US,  # assumed: a dict look-up
            probe_call_ns=5 * NS_PER_US,  # assumed
            probe_key_ns=200,  # assumed
            open_ns=NS_PER_MS,  # assumed
            close_ns=NS_PER_MS,  # assumed
        ),
        Storage(
            "file",
            read_bytes_per_s=2 * GB,  # measured, files of 256 KiB read cold: 1.7-2.0 GB/s
            write_bytes_per_s=1_500_000_000,  # measured, the same files first written: 0.7-3.2
            call_ns=50 * NS_PER_US,  # assumed
            page_ns=55 * NS_PER_US,  # measured: opening 256 files takes 14 ms
            probe_call_ns=10 * NS_PER_US,  # assumed
            probe_key_ns=5 * NS_PER_US,  # assumed: one stat()
        ),
        Storage(
            "mooncake",
            read_bytes_per_s=_NIC_SHARE,
            write_bytes_per_s=_NIC_SHARE,
            call_ns=200 * NS_PER_US,  # assumed: master round trip and hand-over over RDMA
            page_ns=4 * NS_PER_US,  # assumed: two objects a page
            probe_call_ns=_PROBE_CALL,
            probe_key_ns=_PROBE_KEY,
        ),
        Storage(
            "nixl",
            read_bytes_per_s=17_200
            * GIB
            // 1000,  # measured, nixlbench POSIX, Llama 8B: 17.2 GiB/s
            write_bytes_per_s=8_600 * GIB // 1000,  # assumed: half of the read
            call_ns=100 * NS_PER_US,  # assumed
            page_ns=20 * NS_PER_US,  # assumed: one file a page, opened beside the transfer
            probe_call_ns=50 * NS_PER_US,  # assumed
            probe_key_ns=5 * NS_PER_US,  # assumed: one stat()
        ),
        Storage(
            "hf3fs",
            read_bytes_per_s=5 * GIB,  # measured, DeepSeek 3FS: 40 GiB/s a client node, by 8 ranks
            write_bytes_per_s=2 * GIB,  # assumed: chain replication writes each byte more than once
            call_ns=NS_PER_MS,  # assumed: ring submission and a metadata request
            page_ns=5 * NS_PER_US,  # assumed
            probe_call_ns=500 * NS_PER_US,  # assumed: one HTTP request to the metadata server
            probe_key_ns=NS_PER_US,  # assumed
        ),
        Storage(
            "aibrix",
            read_bytes_per_s=830_000_000,  # measured, RocksDB engine on a small VM: 0.21-0.83 GB/s
            write_bytes_per_s=410_000_000,  # measured, the same: 0.17-0.41 GB/s
            call_ns=200 * NS_PER_US,  # assumed
            page_ns=10 * NS_PER_US,  # assumed
            probe_call_ns=179 * NS_PER_US,  # measured: one exists(), 179 us
            probe_key_ns=10 * NS_PER_US,  # assumed
        ),
        Storage(
            "dynamic",
            read_bytes_per_s=5 * GB,  # upstream's `sim` backend by default: 5 GB/s, 100 us
            write_bytes_per_s=5 * GB,
            call_ns=100 * NS_PER_US,
            page_ns=0,
            probe_call_ns=100 * NS_PER_US,
            probe_key_ns=0,
        ),
    )
}


def hardware_named(name: str) -> Hardware:
    """The preset ``name``; raises ConfigError that lists the choices."""
    require_choice("--hardware", name, tuple(HARDWARE))
    return HARDWARE[name]


def model_named(name: str) -> Model:
    """The preset ``name``; raises ConfigError that lists the choices."""
    known = ", ".join(MODELS)
    require(
        name in MODELS,
        f"--model {name!r} is unknown; choose one of {known}; to load a model, name it with --model-path",
    )
    return MODELS[name]


def storage_named(name: str) -> Storage:
    """The preset ``name``; raises ConfigError that lists the choices."""
    require_choice("--hicache-storage-backend", name, tuple(STORAGES))
    return STORAGES[name]
