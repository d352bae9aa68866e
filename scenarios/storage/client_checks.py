"""What every store with a client library of its own is held to; each check fails by an assertion."""

from __future__ import annotations

from threading import Thread

from refimpl.storage.backend import Backend
from scenarios.storage.host_pages import KEYS, PAGES, HostPages, payload


def check_what_is_missing_leaves_the_rest_alone(host: HostPages, store: Backend) -> None:
    """Every other page of a batch is stored."""
    names = host.names()
    store.set(names[::2], host.sources()[::2])
    every_other = [at % 2 == 0 for at in range(PAGES)]
    assert store.exists(names) == every_other
    assert store.get(names, host.targets()) == every_other
    for at in range(0, PAGES, 2):
        assert payload(host.page(at)) == payload(host.page(PAGES + at))


def check_the_first_value_is_kept(host: HostPages, store: Backend) -> None:
    name = host.names()[:1]
    store.set(name, [host.page(0)])
    assert store.set(name, [host.page(1)]) == [True]
    store.get(name, host.targets(1))
    assert payload(host.page(PAGES)) == payload(host.page(0))


def check_deleted_pages_can_be_written_again(
    host: HostPages, store: Backend, absent: str = "absent"
) -> None:
    name = host.names()[:1]
    store.set(name, [host.page(0)])
    delete = store.delete  # type: ignore[attr-defined]  # what only some backends can
    assert delete([*name, absent]) == [True, True]
    assert store.exists(name) == [False]
    store.set(name, [host.page(1)])
    store.get(name, host.targets(1))
    assert payload(host.page(PAGES)) == payload(host.page(1))


def check_threads_mix_no_pages(host: HostPages, store: Backend, turns: int) -> None:
    """Each thread writes and reads pages of its own, ``turns`` times."""
    wrong: list[int] = []

    def work(at: int) -> None:
        for turn in range(turns):
            name = host.names([KEYS[at * turns + turn]])
            store.set(name, [host.page(at)])
            is_read = store.get(name, [host.page(PAGES + at)])
            if is_read != [True] or payload(host.page(at)) != payload(host.page(PAGES + at)):
                wrong.append(at)

    threads = [Thread(target=work, args=(at,)) for at in range(PAGES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
