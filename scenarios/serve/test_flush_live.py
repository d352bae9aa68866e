"""Flushes of a running server: refused while anything is in flight, which they name, and final once done."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.run.options import Options
from refimpl.storage.file import FileBackend
from scenarios.serve.served import OPTIONS, serving, serving_null

pytestmark = pytest.mark.live

PATH = "/hicache/storage-backend"
PAGE = OPTIONS.page_size
SECONDS_MAX = 60


def generate(client: httpx.Client, number: int, pages: int = 4) -> int:
    """The cached tokens of a prompt of so many pages, and a token more."""
    tokens = [(number * 41 + at) % 250 for at in range(pages * PAGE + 1)]
    params = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = client.post("/generate", json={"input_ids": tokens, "sampling_params": params})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["meta_info"]["cached_tokens"])


def attach(client: httpx.Client, folder: Path) -> httpx.Response:
    extra = f'{{"file_storage_path": "{folder}", "prefetch_threshold": 16}}'
    body = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": extra,
        "hicache_storage_prefetch_policy": "wait_complete",
        "drain": "queue",
    }
    return client.put(PATH, json=body)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with serving() as (url, _), httpx.Client(base_url=url, timeout=SECONDS_MAX) as found:
        assert attach(found, tmp_path).status_code == 200
        yield found


def test_a_flush_that_may_wait_succeeds_right_after_each_of_120_answers(
    client: httpx.Client,
) -> None:
    """Field report L04."""
    for number in range(120):
        generate(client, number, pages=2)
        answer = client.post("/flush_cache?timeout=5")
        assert answer.status_code == 200, f"{number}: {answer.text}"


def test_a_flush_during_copies_says_what_is_pending_and_they_bring_nothing_back(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field reports L04 and L08: five prompts are being stored; after the flush they are new to L1 and L2."""
    released = threading.Event()
    store = FileBackend.set

    def held(*args: object, **more: object) -> object:
        assert released.wait(SECONDS_MAX)
        return store(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(FileBackend, "set", held)
    assert [generate(client, number) for number in range(5)] == [0] * 5
    refused = client.post("/flush_cache")
    assert refused.status_code == 400
    found = re.search(r"#in-flight=(\d+)", refused.text)
    assert found, refused.text
    assert int(found[1]) >= 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/flush_cache?timeout=30")
        released.set()
        assert waiting.result(SECONDS_MAX).status_code == 200
    assert client.delete(PATH).status_code == 200  # so that L3 can't answer for them
    assert [generate(client, number) for number in range(5)] == [0] * 5
    assert generate(client, 4) == 4 * PAGE


@pytest.mark.parametrize("model", ["tiny-gqa", "tiny-mla", None])
def test_every_kind_of_cache_can_be_attached_asked_and_detached(
    model: str | None, tmp_path: Path
) -> None:
    """Field report L06; None: no model at all."""
    server = serving(OPTIONS, model) if model else serving_null(OPTIONS)
    with server as (url, _), httpx.Client(base_url=url, timeout=SECONDS_MAX) as client:
        answer = attach(client, tmp_path)
        assert answer.status_code == 200, answer.text
        assert client.get(PATH).json()["hicache_storage_backend"] == "file"
        generate(client, 1)
        assert client.post("/flush_cache?timeout=30").status_code == 200
        assert generate(client, 1) == 4 * PAGE
        assert client.delete(PATH).status_code == 200
        assert client.get(PATH).json()["hicache_storage_backend"] is None


def test_a_server_without_l2_says_that_it_can_not_attach(tmp_path: Path) -> None:
    """Field report L06: in the status and in the text."""
    options = replace(OPTIONS, enable_hierarchical_cache=False)
    with serving_null(options) as (url, _), httpx.Client(base_url=url) as client:
        answer = attach(client, tmp_path)
        assert answer.status_code == 400
        assert "Hierarchical cache is not enabled" in answer.text


@pytest.mark.parametrize(("tokens", "hits"), [(9, 0), (13, 12)])
def test_host_pages_that_are_not_loaded_are_counted_as_computed(tokens: int, hits: int) -> None:
    """Field report V04: two pages of four tokens are too few to be loaded, three are enough."""
    options = Options(page_size=4, max_total_tokens=64, enable_hierarchical_cache=True)
    with serving_null(options) as (url, _), httpx.Client(base_url=url) as client:

        def ask(first: int, count: int) -> int:
            body = {"input_ids": list(range(first, first + count))}
            body |= {"sampling_params": {"max_new_tokens": 2}}
            return int(client.post("/generate", json=body).json()["meta_info"]["cached_tokens"])

        assert [ask(0, tokens), ask(1000, 60)] == [0, 0]  # the second fills L1
        assert ask(0, tokens) == hits
        told = client.get("/metrics").text
    counted = [line for line in told.splitlines() if line.startswith("sglang:cached_tokens_total")]
    assert {line.rsplit(" ", 1)[1] for line in counted} == {"0.0", f"{hits}.0"}
    assert re.search(rf"^hicache:prefill_tokens_skipped_total\S* {hits}\.0$", told, re.MULTILINE)
