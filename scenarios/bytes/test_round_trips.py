"""Bytes after any round trip through L2 equal the bytes before it, whatever they mean."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from refimpl.config import ConfigError  # noqa: E402
from refimpl.memory.layout import AXES, Geometry, shape_of, strides_of  # noqa: E402
from refimpl.memory.pool import Pool, check_host_memory  # noqa: E402
from refimpl.memory.transfer import Mover, runs  # noqa: E402
from scenarios.bytes.rig import bits  # noqa: E402

GQA = Geometry(layers=3, kvs=2, heads=2, dim=8, page_size=4)
MLA = Geometry(layers=3, kvs=1, heads=1, dim=12, page_size=4)
PAIRS = [
    (geometry, layout, io)
    for geometry, layout, io in itertools.product((GQA, MLA), AXES, ("kernel", "direct"))
    if not (geometry.is_mla and layout == "page_head")
]


def tag(pool: Pool, salt: int) -> None:
    """Every 16-bit element says where it is: kv, layer, page, token, head, dim."""
    view = bits(pool.by_page())
    view.copy_((torch.arange(view.numel()) * 31 + salt).view(view.shape).to(view.dtype))
    pool.by_page().copy_(view.view(pool.tensor.dtype))


def loaded(mover: Mover, l2: list[int], l1: list[int]) -> None:
    """Load pages and wait for all layers."""
    mover.load(l2, l1).wait(mover.host.geometry.layers - 1)


@pytest.mark.parametrize(("geometry", "layout", "io"), PAIRS)
def test_pages_come_back_as_they_went(geometry: Geometry, layout: str, io: str) -> None:
    device, host = Pool(geometry, "layer_first", 8), Pool(geometry, layout, 11)
    tag(device, 5)
    before, mover = device.by_page().clone(), Mover(device, host, io)
    l1, l2, to = [5, 6, 0, 3], [2, 3, 10, 7], [1, 2, 4, 7]
    mover.back_up(l1, l2)
    device.tensor.zero_()
    loaded(mover, l2, to)
    assert torch.equal(bits(device.by_page()[to]), bits(before[l1]))
    others = [slot for slot in range(8) if slot not in to]
    assert not bits(device.by_page()[others]).any()


@pytest.mark.parametrize(("geometry", "layout", "io"), PAIRS)
def test_layers_arrive_in_order_and_each_is_whole_when_it_has(
    geometry: Geometry, layout: str, io: str
) -> None:
    """Each layer is compared as soon as it has been waited for, not at the end."""
    device, host = Pool(geometry, "layer_first", 4), Pool(geometry, layout, 4)
    tag(device, 9)
    before, mover = device.by_page()[:2].clone(), Mover(device, host, io)
    mover.back_up([0, 1], [2, 3])
    device.tensor.zero_()
    loading = mover.load([2, 3], [0, 1])
    for layer in range(geometry.layers):
        loading.wait(layer)
        assert torch.equal(bits(device.by_page()[:2, :, layer]), bits(before[:, :, layer]))


@settings(max_examples=30)
@given(data=st.data())
def test_any_page_lists_arrive_in_their_order(data: st.DataObject) -> None:
    geometry, layout, io = data.draw(st.sampled_from(PAIRS))
    count = data.draw(st.integers(1, 6))
    l1 = data.draw(st.permutations(range(8)))[:count]
    l2 = data.draw(st.permutations(range(9)))[:count]
    device, host = Pool(geometry, "layer_first", 8), Pool(geometry, layout, 9)
    tag(device, 1)
    Mover(device, host, io).back_up(l1, l2)
    assert torch.equal(bits(host.by_page()[l2]), bits(device.by_page()[l1]))


def test_nan_minus_zero_and_denormals_survive() -> None:
    odd = torch.tensor([float("nan"), -0.0, 1e-40, float("-inf")] * 2, dtype=torch.bfloat16)
    device, host = Pool(GQA, "layer_first", 2), Pool(GQA, "page_head", 2)
    device.by_page()[0] = odd
    before, mover = device.by_page()[0].clone(), Mover(device, host, "kernel")
    mover.back_up([0], [1])
    loaded(mover, [1], [1])
    assert torch.equal(bits(device.by_page()[1]), bits(before))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("layer_first", (2, 3, 5, 4, 2, 8)),
        ("page_first", (2, 5, 4, 3, 2, 8)),
        ("page_first_direct", (2, 5, 3, 4, 2, 8)),
        ("page_head", (2, 5, 2, 4, 3, 8)),
    ],
)
def test_a_layout_is_upstreams_order_of_axes(layout: str, shape: tuple[int, ...]) -> None:
    assert shape_of(layout, GQA, 5) == shape
    pool = Pool(GQA, layout, 5)
    strides = strides_of(layout, GQA, 5)
    seen = [step // 4 for step in pool.by_page().stride()[:5]]  # four elements a word
    assert seen == [strides.page, strides.kv, strides.layer, strides.token, strides.head]


def test_neighbours_on_both_sides_are_one_run() -> None:
    assert list(runs([3, 4, 5, 9], [0, 1, 7, 8])) == [((3, 0), 2), ((5, 7), 1), ((9, 8), 1)]


def test_a_pool_too_large_for_the_host_says_what_fits() -> None:
    with pytest.raises(ConfigError, match="tokens fit"):
        check_host_memory(1 << 60, GQA)


def test_page_head_is_refused_where_there_are_no_heads() -> None:
    with pytest.raises(ConfigError, match="no heads"):
        Pool(MLA, "page_head", 2)


def test_a_head_of_odd_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 8 bytes"):
        Geometry(layers=1, kvs=2, heads=1, dim=3, page_size=1)


@pytest.mark.parametrize(("geometry", "layout"), sorted({pair[:2] for pair in PAIRS}, key=str))
def test_the_pieces_of_a_page_joined_are_what_upstream_stores(
    geometry: Geometry, layout: str
) -> None:
    """Layout order, K before V (spec 3: ``get_data_page``), in as few pieces as the layout allows."""
    pool = Pool(geometry, layout, 5)
    tag(pool, 3)
    axes = [axis for axis in AXES[layout] if axis != "page"]
    order = ("kv", "layer", "token", "head", "dim")
    flat = pool.by_page()[2].permute([order.index(axis) for axis in axes]).contiguous()
    pieces = pool.pieces(2)
    assert b"".join(pieces) == bits(flat).numpy().tobytes()
    per_kv = geometry.layers if layout == "layer_first" else 1
    assert len(pieces) == geometry.kvs * per_kv
    pieces[0][:2] = b"\x07\x07"
    assert bits(pool.by_page()[2]).flatten()[0] == 0x0707
