"""L3 is cleared, and changed under load, over HTTP: what is deleted, what is kept, who has to wait."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.serve.admin import Keys
from scenarios.serve.served import OPTIONS, serving, serving_null

pytestmark = pytest.mark.live

PATH = "/hicache/storage-backend"
CLEAR = f"{PATH}/clear"
CLEARED = "Hierarchical cache storage backend cleared.\n"
SECONDS_MAX = 60
TOKENS = list(range(1, 100))  # six full pages


def ask(client: httpx.Client, tokens: list[int] = TOKENS, new: int = 4) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": params}
    return client.post("/generate", json=body, timeout=SECONDS_MAX)


def details(client: httpx.Client) -> dict[str, Any]:
    answer = ask(client)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["meta_info"]["cached_tokens_details"] or {})


def attach_file(client: httpx.Client, folder: Path, drain: str = "queue") -> httpx.Response:
    extra = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": 16})
    body = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": extra,
        "hicache_storage_prefetch_policy": "wait_complete",
        "drain": drain,
    }
    return client.put(PATH, json=body, timeout=SECONDS_MAX)


def flush(client: httpx.Client) -> None:
    answer = client.post(f"/flush_cache?timeout={SECONDS_MAX}", timeout=SECONDS_MAX)
    assert answer.status_code == 200, answer.text


def stored_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.bin"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_clear_deletes_the_pages_of_the_namespace_and_they_are_written_again(
    ranks: int, tmp_path: Path
) -> None:
    options = replace(OPTIONS, tp_size=ranks)
    with serving(options) as (url, _), httpx.Client(base_url=url) as client:
        assert attach_file(client, tmp_path).status_code == 200
        details(client)
        flush(client)
        pages = stored_names(tmp_path)
        assert len(pages) == 6 * ranks
        foreign = tmp_path / f"{'0' * 64}_another-model.bin"
        foreign.write_bytes(b"of somebody else")
        assert details(client)["storage"] == 96
        answer = client.post(CLEAR)
        assert (answer.status_code, answer.text) == (200, CLEARED)
        assert stored_names(tmp_path) == [foreign.name]
        assert details(client)["device"] == 96  # L1 and L2 keep what they have
        flush(client)
        assert stored_names(tmp_path) == sorted([foreign.name, *pages])
        assert details(client)["storage"] == 96


def test_a_clear_without_a_store_or_in_the_middle_of_something_is_refused(tmp_path: Path) -> None:
    with serving() as (url, _), httpx.Client(base_url=url) as client:
        answer = client.post(CLEAR)
        assert answer.status_code == 400
        assert "no storage backend is attached" in answer.text
        assert attach_file(client, tmp_path).status_code == 200
        body = {"text": "x", "stream": True}
        body["sampling_params"] = {"max_new_tokens": 900, "ignore_eos": True}  # type: ignore[assignment]
        with client.stream("POST", "/generate", json=body) as stream:
            lines = stream.iter_lines()  # kept: the stream is closed with it
            next(lines)
            answer = client.post(CLEAR)
        assert answer.status_code == 400
        assert "not idle" in answer.text
        assert client.delete(f"{PATH}?drain=queue", timeout=SECONDS_MAX).status_code == 200


def test_a_store_that_can_not_be_cleared_says_why_and_is_used_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as (url, service), httpx.Client(base_url=url) as client:
        assert attach_file(client, tmp_path).status_code == 200
        store = service.bridge._executor.storage._attached.store  # type: ignore[attr-defined]

        def fails() -> int:
            raise OSError("the folder is gone")

        monkeypatch.setattr(store.backend, "clear", fails)
        answer = client.post(CLEAR)
        assert answer.status_code == 400
        assert "the folder is gone" in answer.text
        details(client)
        flush(client)
        assert details(client)["storage"] == 96


def test_a_clear_and_the_layout_of_l3_need_the_key_of_the_admin() -> None:
    with serving_null(keys=Keys("user", "admin", strict=True)) as (url, _):
        user, admin = ({"authorization": f"Bearer {key}"} for key in ("user", "admin"))
        layout = f"{url}/get_hicache_l3_cache_layout"
        assert httpx.post(f"{url}{CLEAR}", headers=user).status_code == 401
        assert httpx.get(layout, headers=user).status_code == 401
        assert httpx.get(layout, headers=admin).status_code == 200
        assert httpx.get(f"{url}/ready").status_code == 200  # open to all, as /health


def test_the_layout_of_l3_names_the_pages_that_are_there(tmp_path: Path) -> None:
    path = "/get_hicache_l3_cache_layout"
    with serving() as (url, _), httpx.Client(base_url=url) as client:
        told = client.get(path).json()
        assert told["enabled"] is False
        assert told["backend"] is None
        assert told["reason"]
        assert attach_file(client, tmp_path).status_code == 200
        details(client)
        flush(client)
        told = client.get(path).json()
        assert (told["enabled"], told["backend"], told["page_size"]) == (True, "file", 16)
        layout = told["hicache_object_layout"]
        assert layout["is_mla_backend"] is False
        for name in stored_names(tmp_path):
            key = name.removesuffix(".bin").removeprefix(layout["key_prefix"])
            assert len(bytes.fromhex(key.removesuffix(layout["key_suffix"]))) == 32


def until_attached(client: httpx.Client, change: Future[httpx.Response]) -> Counter[int]:
    """What requests and ``/ready`` answer while a change drains, and the change is done."""
    found: Counter[int] = Counter()
    end = monotonic() + SECONDS_MAX
    while not change.done():
        assert monotonic() < end
        found[client.get("/ready").status_code] += 1
        wait([change], timeout=0.05)
    return found


@pytest.mark.parametrize("drain", ["queue", "refuse"])
def test_storage_is_attached_under_load_without_losing_a_request(
    drain: str, tmp_path: Path
) -> None:
    """Held back with ``queue``; with ``refuse`` those that come meanwhile are told to come again."""
    with serving_null(OPTIONS) as (url, service), httpx.Client(base_url=url) as client:
        with ThreadPoolExecutor(12) as pool:
            long = pool.submit(ask, client, TOKENS, 200)
            end = monotonic() + SECONDS_MAX
            while not service.bridge.engine.running:
                assert monotonic() < end, "the request does not begin"
            change = pool.submit(attach_file, client, tmp_path, drain)
            while not service.bridge.engine._attachment.holds_back and not change.done():
                assert monotonic() < end, "the change does not begin"
            load = [pool.submit(ask, client, [*TOKENS, number]) for number in range(8)]
            ready = until_attached(client, change)
            answers = [each.result(SECONDS_MAX) for each in load]
            assert change.result().status_code == 200, change.result().text
            assert long.result(SECONDS_MAX).status_code == 200
        statuses = Counter(answer.status_code for answer in answers)
        if drain == "queue":
            assert statuses == {200: 8}
            assert ready[503] == 0
        else:
            assert statuses[503] > 0
            assert statuses[200] + statuses[503] == 8
            refused = next(answer for answer in answers if answer.status_code == 503)
            assert refused.headers["retry-after"] == "1"
            assert ready[503] > 0
        assert client.get("/ready").status_code == 200
        assert ask(client).status_code == 200
