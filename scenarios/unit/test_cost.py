"""Facts of the cost model: closed forms against loops, and figures published elsewhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.config import LAYOUTS, ConfigError, Transfer
from refimpl.run.cost import Cost, overlapped_ns
from refimpl.run.hardware import HARDWARE, MODELS, STORAGES, hardware_named, model_named
from refimpl.units import GB, NS_PER_MS, ceil_div


def cost_of(
    hardware: str = "h200",
    model: str = "llama-3.1-8b",
    tp_size: int = 1,
    layout: str = "page_first",
    io_backend: str = "kernel",
    storage: str = "memory",
    page_size: int = 64,
) -> Cost:
    transfer = Transfer(layout, io_backend)
    return Cost(hardware_named(hardware), model_named(model), tp_size, transfer, page_size, storage)


def overlap_by_loop(layers: int, launch_ns: int, load_ns: int, compute_ns: int) -> int:
    end = launch_ns
    for layer in range(layers):
        end = max(end, (layer + 1) * load_ns) + compute_ns
    return end


@given(st.integers(1, 80), *[st.integers(0, 10**7)] * 3)
def test_the_overlap_formula_equals_the_loop_over_layers(
    layers: int, launch_ns: int, load_ns: int, compute_ns: int
) -> None:
    by_loop = overlap_by_loop(layers, launch_ns, load_ns, compute_ns)
    assert overlapped_ns(layers, launch_ns, load_ns, compute_ns) == by_loop


def test_a_short_load_hides_behind_a_long_prefill_but_for_its_first_layer() -> None:
    cost = cost_of()
    alone = cost.prefill_ns([(4096, 8192)])
    with_load = cost.prefill_ns([(4096, 8192)], load_pages=64)
    assert cost.load_ns(64) > 10 * NS_PER_MS
    assert with_load - alone <= ceil_div(cost.load_ns(64), cost.model.layers)


def test_a_long_load_sets_the_time_of_a_short_prefill() -> None:
    cost = cost_of()
    with_load = cost.prefill_ns([(32_768, 64)], load_pages=512)
    assert 0 < with_load - cost.load_ns(512) < cost.prefill_ns([(32_768, 64)])


def test_a_later_chunk_of_a_prompt_costs_more_than_an_earlier_one() -> None:
    cost = cost_of()
    assert cost.prefill_ns([(65_536, 8192)]) > cost.prefill_ns([(0, 8192)]) * 3 // 2


def test_chunks_of_a_prompt_attend_to_as_many_pairs_as_the_whole() -> None:
    cost = cost_of()
    launch = cost.hardware.prefill_launch_ns
    whole = cost.prefill_ns([(0, 8192)]) - launch
    halves = cost.prefill_ns([(0, 4096)]) + cost.prefill_ns([(4096, 4096)]) - 2 * launch
    assert whole <= halves < whole * 101 // 100


def test_a_prefill_on_an_h20_takes_what_its_flops_say() -> None:
    """Llama-3.1-8B, 8,192 tokens: 2 * 6.98e9 * 8192 linear and 524,288 * 8192**2 / 2 attention."""
    cost = cost_of("h20")
    flops = 2 * (8_030_261_248 - 2 * 128_256 * 4096) * 8192 + 524_288 * 8192 * 8193 // 2
    expected = flops * 10**9 // (148 * 10**12 * 88 // 100)
    measured = cost.prefill_ns([(0, 8192)]) - cost.hardware.prefill_launch_ns
    assert expected < measured < expected * 1001 // 1000


def test_a_small_prefill_reads_the_weights_once() -> None:
    cost = cost_of()
    weights_ns = 8_030_261_248 * 2 * 10**9 // (4800 * GB * 87 // 100)
    assert cost.prefill_ns([(0, 1)]) >= weights_ns + cost.hardware.prefill_launch_ns


def decode_by_loop(cost: Cost, running: int, context: int, steps: int) -> int:
    """One step at a time, each started anew: rounding up makes each up to 1 ns longer."""
    return sum(cost.decode_ns(running, context + running * i, 1) for i in range(steps))


@given(
    st.sampled_from([("llama-3.1-8b", 1), ("deepseek-r1", 8)]),
    st.integers(1, 4096),
    st.integers(0, 200_000),
    st.integers(1, 60),
)
def test_decode_of_many_steps_equals_the_steps_one_by_one(
    combo: tuple[str, int], running: int, context: int, steps: int
) -> None:
    cost = cost_of(model=combo[0], tp_size=combo[1])
    by_loop = decode_by_loop(cost, running, context, steps)
    assert by_loop - steps <= cost.decode_ns(running, context, steps) <= by_loop


def test_decode_changes_from_flops_to_bytes_within_one_jump() -> None:
    """256 sequences without context are bound by FLOPs on an H20 at first, by KV bytes later."""
    cost = cost_of("h20")
    twice_flops = replace(cost.hardware, flops_per_s=2 * cost.hardware.flops_per_s)
    faster = Cost(twice_flops, cost.model, 1, cost.transfer, 64)
    assert cost.decode_ns(256, 0, 1) > faster.decode_ns(256, 0, 1)
    assert cost.decode_ns(256, 256 * 9999, 1) == faster.decode_ns(256, 256 * 9999, 1)
    by_loop = decode_by_loop(cost, 256, 0, 10_000)
    assert by_loop - 10_000 <= cost.decode_ns(256, 0, 10_000) <= by_loop


@given(st.integers(1, 300), st.integers(0, 10**6), st.integers(1, 500), st.integers(0, 10**10))
def test_the_step_found_is_the_first_that_ends_late_enough(
    running: int, context: int, steps_max: int, elapsed: int
) -> None:
    cost = cost_of()
    steps = cost.decode_steps_within(running, context, steps_max, elapsed)
    assert 1 <= steps <= steps_max
    assert steps == steps_max or cost.decode_ns(running, context, steps) >= elapsed
    assert steps == 1 or cost.decode_ns(running, context, steps - 1) < elapsed


def test_a_sparse_model_reads_the_weights_of_one_token_and_at_most_all_of_them() -> None:
    cost = cost_of(model="deepseek-r1", tp_size=8)
    hbm = 4800 * GB * 87 // 100
    fixed = cost.decode_ns(0, 0, 1)
    assert cost.decode_ns(1, 0, 1) - fixed < 37 * 10**9 // 8 * 10**9 // hbm * 101 // 100
    assert cost.decode_ns(64, 0, 1) - fixed >= 671 * 10**9 // 8 * 10**9 // hbm


def test_decode_time_grows_with_every_step() -> None:
    cost = cost_of()
    ends = [cost.decode_ns(8, 1000, steps) for steps in range(100)]
    assert ends[0] == 0
    assert all(early < late for early, late in pairwise(ends))


@pytest.mark.parametrize(
    ("model", "tp_size", "expected"),
    [
        ("llama-3.1-8b", 1, 131_072),
        ("llama-3.1-8b", 8, 16_384),
        ("llama-3.1-8b", 16, 16_384),  # 8 KV heads, each on two ranks
        ("llama-3.1-70b", 8, 40_960),
        ("deepseek-r1", 1, 70_272),
        ("deepseek-r1", 8, 70_272),  # every rank holds the latent
    ],
)
def test_kv_bytes_of_a_token(model: str, tp_size: int, expected: int) -> None:
    assert cost_of(model=model, tp_size=tp_size).kv_bytes_per_token == expected


def test_a_load_of_8192_tokens_takes_the_link_time_of_one_gib() -> None:
    cost = cost_of(layout="layer_first", io_backend="direct")
    pieces = 128 * 2 * 32 * cost.hardware.piece_ns
    assert cost.load_ns(128) - pieces == ceil_div((1 << 30) * 10**9, 50 * GB)


def test_the_kernel_loads_up_to_three_times_as_fast_as_direct_copies() -> None:
    """The published claim for the pair upstream compares."""
    kernel = cost_of(layout="page_first", io_backend="kernel").load_ns(128)
    direct = cost_of(layout="layer_first", io_backend="direct").load_ns(128)
    assert 2 * kernel < direct < 3 * kernel


def test_a_direct_copy_of_page_first_direct_is_issued_faster_than_of_layer_first() -> None:
    batched = cost_of(layout="page_first_direct", io_backend="direct")
    single = cost_of(layout="layer_first", io_backend="direct")
    assert batched.load_ns(10) < single.load_ns(10)
    assert batched.backup_ns(10) < single.backup_ns(10)


def test_a_kernel_is_launched_for_each_layer_of_a_load_and_once_for_a_backup() -> None:
    cost = cost_of()
    saved = 31 * cost.hardware.kernel_launch_ns
    assert cost.load_ns(5) - cost.backup_ns(5) == saved


def test_page_head_copies_slower_than_page_first() -> None:
    assert cost_of(layout="page_head").load_ns(100) > cost_of().load_ns(100)


def test_layer_first_pages_are_staged_on_their_way_to_l3() -> None:
    staged = cost_of(layout="layer_first")
    assert staged.fetch_batch_ns(128) - cost_of().fetch_batch_ns(128) > 100 * NS_PER_MS


def test_a_probe_is_asked_in_calls_of_128_keys() -> None:
    cost = cost_of(storage="mooncake")
    extra = cost.probe_ns(129) - cost.probe_ns(128)
    assert extra == cost.storage.probe_call_ns + cost.storage.probe_key_ns


def test_nothing_costs_nothing() -> None:
    cost = cost_of()
    assert cost.load_ns(0) == cost.backup_ns(0) == cost.probe_ns(0) == 0


def test_reading_a_file_hit_of_8192_tokens_takes_longer_than_computing_it() -> None:
    """The published weak spot: a file backend that loses against recomputing."""
    cost = cost_of(storage="file")
    assert cost.fetch_batch_ns(128) > cost.prefill_ns([(0, 8192)])


def test_reading_from_mooncake_is_faster_than_computing() -> None:
    cost = cost_of(storage="mooncake")
    assert cost.fetch_batch_ns(128) < cost.prefill_ns([(0, 8192)])


def test_tensor_parallel_prefill_is_faster_but_not_by_the_number_of_ranks() -> None:
    one, eight = cost_of(), cost_of(tp_size=8)
    assert one.prefill_ns([(0, 8192)]) // 8 < eight.prefill_ns([(0, 8192)])
    assert eight.prefill_ns([(0, 8192)]) < one.prefill_ns([(0, 8192)]) // 2


def test_l1_takes_what_the_weights_leave_in_whole_pages() -> None:
    cost = cost_of(page_size=64)
    tokens = cost.l1_tokens_default(85)
    left = 141 * GB * 85 // 100 - 8_030_261_248 * 2
    assert tokens % 64 == 0
    assert left - cost.page_bytes < tokens * 131_072 <= left


def test_a_model_that_does_not_fit_says_what_to_raise() -> None:
    with pytest.raises(ConfigError, match="raise --tp-size or --mem-fraction-static"):
        cost_of(model="llama-3.1-70b").l1_tokens_default(90)


@pytest.mark.parametrize("argument", ["hardware", "model", "storage"])
def test_an_unknown_name_lists_the_choices(argument: str) -> None:
    known = {"hardware": list(HARDWARE), "model": list(MODELS), "storage": list(STORAGES)}[argument]
    with pytest.raises(ConfigError) as caught:
        cost_of(**{argument: "abacus"})  # type: ignore[arg-type]
    assert "'abacus'" in str(caught.value)
    assert all(name in str(caught.value) for name in known)
    assert "\n" not in str(caught.value)


def test_a_tp_size_that_splits_no_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide the 32 heads"):
        cost_of(tp_size=5)


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_time_is_a_positive_integer(storage: str, layout: str) -> None:
    cost = cost_of(layout=layout, storage=storage)
    times = [
        cost.prefill_ns([(0, 1)]),
        cost.decode_ns(1, 1, 1),
        cost.load_ns(1),
        cost.backup_ns(1),
        cost.probe_ns(1),
        cost.fetch_batch_ns(1),
        cost.store_batch_ns(1),
        cost.open_ns,
        cost.close_ns,
    ]
    assert all(type(time) is int and time > 0 for time in times)


def test_another_store_leaves_the_rest_as_it_is() -> None:
    cost = cost_of()
    other = cost.with_storage("file")
    assert other.storage.name == "file"
    assert other.prefill_ns([(0, 100)], 3) == cost.prefill_ns([(0, 100)], 3)
