"""The cache may never change an answer: tokens and KV with it equal those without it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from dataclasses import replace  # noqa: E402

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from refimpl.core.check import walk  # noqa: E402
from refimpl.keys import TokenPrompt  # noqa: E402
from refimpl.memory.transfer import Mover  # noqa: E402
from refimpl.model.config import TINY_GQA, TINY_MLA, ModelConfig  # noqa: E402
from refimpl.run.report import integers  # noqa: E402
from refimpl.workload.request import Workload, unscripted  # noqa: E402
from refimpl.workload.scenario import parse_scenario  # noqa: E402
from scenarios.bytes.rig import Outcome, Rig, bits, run_bytes, run_null, without_cache  # noqa: E402

CHATS = "multi_turn:clients=3,rounds=4,request_length=14,output_length=6,vocab=256,rate=1000"
PAIRS = [
    ("page_first", "kernel"),
    ("layer_first", "direct"),
    ("layer_first", "kernel"),
    ("page_first_direct", "direct"),
    ("page_head", "kernel"),
]


def chats(seed: int = 3) -> Workload:
    return parse_scenario(CHATS, seed, 4)


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[int, list[int]]]:
    """What each model answers without any cache."""
    return {
        model.name: run_bytes(without_cache(Rig()), model, unscripted(chats())).outputs
        for model in (TINY_GQA, TINY_MLA)
    }


@pytest.mark.parametrize("model", [TINY_GQA, TINY_MLA], ids=lambda model: model.name)
@pytest.mark.parametrize(("layout", "io"), PAIRS)
def test_answers_do_not_depend_on_the_cache(
    model: ModelConfig, layout: str, io: str, answers: dict[str, dict[int, list[int]]]
) -> None:
    if model.mla and layout == "page_head":
        pytest.skip(reason="an MLA pool has no heads to put first")
    outcome = run_bytes(Rig(layout=layout, io_backend=io), model, unscripted(chats()))
    moved = integers(outcome.record)["pages_moved"]
    assert moved["load_back"] > 0
    assert moved["backup"] > 0
    assert outcome.outputs == answers[model.name]


@pytest.mark.parametrize("layout", ["page_first", "page_head"])
def test_every_page_left_in_the_cache_is_what_a_fresh_prefill_writes(layout: str) -> None:
    small = kept_pages(run_bytes(Rig(layout=layout), TINY_GQA, unscripted(chats())))
    roomy = Rig(layout=layout, l1_pages=400, l2_pages=600, storage="", chunk_tokens=4096)
    fresh = kept_pages(run_bytes(roomy, TINY_GQA, unscripted(chats())))
    assert len(small) > 20
    assert small == {key: fresh[key] for key in small}


def kept_pages(outcome: Outcome) -> dict[bytes, bytes]:
    """Bytes of every page in L1 or L2, by key; both copies of a page are the same bytes."""
    device, host = outcome.hands.mover.device.by_page(), outcome.hands.mover.host.by_page()
    pages: dict[bytes, bytes] = {}
    for node in walk(outcome.engine.cache):
        for page in node.pages:
            copies = []
            if page.l1_state:
                copies.append(bits(device[page.l1_slot]).numpy().tobytes())
            if page.l2_state:
                copies.append(bits(host[page.l2_slot]).numpy().tobytes())
            assert len(set(copies)) == 1, "the copies of a page differ"
            pages[page.key] = copies[0]
    return pages


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_answers_do_not_depend_on_any_configuration(data: st.DataObject) -> None:
    layout, io = data.draw(st.sampled_from(PAIRS))
    page = data.draw(st.sampled_from([1, 2, 4, 8]))
    rig = Rig(
        page_size=page,
        l1_pages=data.draw(st.integers(110, 170)) // page,
        l2_pages=data.draw(st.integers(60, 260)) // page,
        layout=layout,
        io_backend=io,
        write_policy=data.draw(
            st.sampled_from(["write_through", "write_back", "write_through_selective"])
        ),
        prefetch_policy=data.draw(st.sampled_from(["best_effort", "wait_complete", "timeout"])),
        chunk_tokens=data.draw(st.sampled_from([8, 16, 64])),
        storage=data.draw(st.sampled_from(["", "memory"])),
        faults=data.draw(
            st.sampled_from(["", "load_fail=200000,backup_fail=200000,fetch_short=300000"])
        ),
    )
    workload = unscripted(chats(data.draw(st.integers(0, 3))))
    plain = run_bytes(without_cache(replace(rig, l1_pages=2400 // page)), TINY_GQA, workload)
    assert run_bytes(rig, TINY_GQA, workload).outputs == plain.outputs


@pytest.mark.parametrize("hardware", ["h200", "h100", "h20", "a100"])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_with_a_script_hands_with_and_without_bytes_decide_alike(
    hardware: str, policy: str
) -> None:
    rig = Rig(hardware=hardware, write_policy=policy)
    assert run_bytes(rig, TINY_GQA, chats()).record.digest == run_null(rig, chats()).digest


def test_what_a_free_run_said_replayed_as_a_script_gives_the_same_log() -> None:
    said = run_bytes(Rig(), TINY_GQA, unscripted(chats()))
    scripted = []
    for spec in chats().requests:
        assert isinstance(spec.prompt, TokenPrompt)
        tokens = spec.prompt.tokens
        output = type(tokens)("I", said.outputs[spec.rid])
        scripted.append(replace(spec, prompt=TokenPrompt(tokens, output)))
    assert run_null(Rig(), replace(chats(), requests=scripted)).digest == said.record.digest


def test_a_copy_from_the_wrong_page_changes_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the tests: a load that reads the slot beside the right one is noticed."""
    load = Mover.load

    def beside(mover: Mover, l2_slots: list[int], l1_slots: list[int]) -> object:
        wrong = [(slot + 1) % mover.host.pages for slot in l2_slots]
        return load(mover, wrong, l1_slots)

    plain = run_bytes(without_cache(Rig()), TINY_GQA, unscripted(chats())).outputs
    monkeypatch.setattr(Mover, "load", beside)
    assert run_bytes(Rig(), TINY_GQA, unscripted(chats())).outputs != plain
