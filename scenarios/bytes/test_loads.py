"""Loads run layer by layer beside the computation: late ones are waited for, early ones run ahead."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from threading import Event

import pytest

torch = pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from refimpl.keys import TokenPrompt  # noqa: E402
from refimpl.memory.transfer import Mover  # noqa: E402
from refimpl.messages import Load, PageTable, PrefillItem, RunBatch, Submit  # noqa: E402
from refimpl.model import transformer  # noqa: E402
from refimpl.model.config import TINY_GQA  # noqa: E402
from refimpl.run.hands import Produced, TorchHands  # noqa: E402
from refimpl.run.live import LiveExecutor  # noqa: E402
from refimpl.run.live_storage import OpenStore  # noqa: E402
from scenarios.bytes.rig import Rig, torch_hands  # noqa: E402

pytestmark = pytest.mark.live
LAYERS = range(TINY_GQA.layers)
SECONDS_MAX = 20


def clean_hands(io_backend: str = "kernel") -> TorchHands:
    """Hands over pools of zeros, since here pages are read that nobody wrote."""
    hands = torch_hands(Rig(io_backend=io_backend), TINY_GQA)
    for pool in (hands.mover.device, hands.mover.host):
        pool.tensor.zero_()
    hands.mover.beside_bytes_min = 0
    return hands


def prompt_of_two_pages(hands: TorchHands) -> None:
    """Prefill it; its first page is loaded."""
    hands.expect(Submit(1, TokenPrompt(array("I", range(1, 9))), 1))
    tables, loads = [PageTable(1, 0, [0, 1, 2])], [Load(1, [3], [0])]
    hands.prefill(RunBatch(1, items=[PrefillItem(1, 4, 4, True)], tables=tables, loads=loads))


def no_store(backend: str, _: str) -> OpenStore:
    raise AssertionError(f"nobody asked for {backend}")


class Watched:
    """Hands whose copies and layers say when they begin and end, and can be held back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hands = clean_hands("direct")
        self.loaded = [Event() for _ in LAYERS]
        self.begun = [Event() for _ in LAYERS]  # to compute a layer
        self.before_load: Callable[[int], None] = lambda _: None
        self.before_compute: Callable[[int], None] = lambda _: None
        copy, forward = Mover._direct, self.hands.model.forward

        def copied(mover: Mover, *ends: object) -> None:
            layer = ends[-1]
            assert isinstance(layer, int)
            self.before_load(layer)
            copy(mover, *ends)  # type: ignore[arg-type]
            self.loaded[layer].set()

        def computed(chunks: object, kv: object, wait: Callable[[int], None]) -> object:
            def before(layer: int) -> None:
                wait(layer)
                assert self.loaded[layer].is_set(), "computed before it was loaded"
                self.begun[layer].set()
                self.before_compute(layer)

            return forward(chunks, kv, before)  # type: ignore[arg-type]

        monkeypatch.setattr(Mover, "_direct", copied)
        monkeypatch.setattr(self.hands.model, "forward", computed)

    def prefill(self) -> None:
        """A prompt whose first page is loaded."""
        prompt_of_two_pages(self.hands)


def test_a_late_load_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)

    def after_the_layer_before_began(layer: int) -> None:
        assert not layer or watched.begun[layer - 1].wait(SECONDS_MAX)

    watched.before_load = after_the_layer_before_began
    watched.prefill()
    assert watched.begun[-1].is_set()


def test_the_next_layer_is_loaded_while_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)

    def until_the_next_is_there(layer: int) -> None:
        assert layer == LAYERS[-1] or watched.loaded[layer + 1].wait(SECONDS_MAX)

    watched.before_compute = until_the_next_is_there
    watched.prefill()
    assert watched.loaded[-1].is_set()


def test_loads_of_one_batch_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    hands, asked, load = clean_hands(), [], Mover.load

    def noted(mover: Mover, l2_slots: list[int], l1_slots: list[int]) -> object:
        asked.append((l2_slots, l1_slots))
        return load(mover, l2_slots, l1_slots)

    monkeypatch.setattr(Mover, "load", noted)
    for rid in (1, 2):
        hands.expect(Submit(rid, TokenPrompt(array("I", range(1, 9))), 1))
    items = [PrefillItem(rid, 4, 4, True) for rid in (1, 2)]
    tables = [PageTable(1, 0, [0, 1]), PageTable(2, 0, [2, 3])]
    hands.prefill(
        RunBatch(1, items=items, tables=tables, loads=[Load(1, [7], [0]), Load(2, [5], [2])])
    )
    assert asked == [([7, 5], [0, 2])]


def test_a_load_that_fails_is_not_computed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)

    def broken(layer: int) -> None:
        if layer:
            raise OSError("the link is down")

    watched.before_load = broken
    with pytest.raises(OSError, match="the link is down"):
        watched.prefill()
    assert not watched.begun[1].is_set()


@pytest.mark.parametrize("is_decode", [False, True])
def test_a_batch_is_done_when_its_streams_are(
    is_decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that a batch frees are reused by the next one, which may copy into them at once."""
    hands, order = clean_hands(), []
    prompt_of_two_pages(hands)
    if is_decode:
        hands.commit(Produced(1, {1: [7]}, ()), 1)
    forward = hands.model.forward

    def noted(*given: object) -> object:
        order.append("forward")
        return forward(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(hands.model, "forward", noted)
    monkeypatch.setattr(hands.mover, "finish", lambda: order.append("finish"))
    if is_decode:
        hands.decode(RunBatch(1))
    else:
        prompt_of_two_pages(hands)
    assert order == ["forward", "finish"]


def test_the_inputs_of_a_batch_are_there_before_its_loads_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small copies would queue behind the burst in one copy engine."""
    hands, order = clean_hands(), []
    load, placed = hands.mover.load, transformer.plan
    monkeypatch.setattr(hands.mover, "load", lambda *_: order.append("load") or load(*_))
    monkeypatch.setattr(transformer, "plan", lambda *_: order.append("inputs") or placed(*_))
    prompt_of_two_pages(hands)
    assert order == ["inputs", "load"]


def test_a_load_into_slots_that_a_late_step_wrote_holds_what_was_loaded() -> None:
    """The pump of the device runs batches in order: a load of the next waits for this one's end."""
    hands, order = clean_hands(), []
    late, load, forward = Event(), hands.mover.load, hands.model.forward

    def slow(*given: object) -> object:
        if not late.is_set():
            assert late.wait(SECONDS_MAX)
        logits = forward(*given)  # type: ignore[arg-type]
        order.append("computed")
        return logits

    def noted(*slots: list[int]) -> object:
        order.append("load")
        return load(*slots)

    hands.model.forward, hands.mover.load = slow, noted  # type: ignore[method-assign,assignment]
    hands.mover.host.by_page()[3] = 2.5
    executor = LiveExecutor(hands, no_store)
    executor.tell(Submit(1, TokenPrompt(array("I", range(1, 9))), 1))
    item = PrefillItem(1, 0, 8, False)
    executor.submit(RunBatch(1, items=[item], tables=[PageTable(1, 0, [0, 1])]))
    executor.tell(Submit(2, TokenPrompt(array("I", range(1, 9))), 1))
    item = PrefillItem(2, 4, 4, True)
    tables, loads = [PageTable(2, 0, [0, 2])], [Load(2, [3], [0])]
    executor.submit(RunBatch(1, items=[item], tables=tables, loads=loads))
    late.set()
    executor.close()
    assert order == ["computed", "load", "computed"]
    assert (hands.mover.device.by_page()[0] == 2.5).all()
