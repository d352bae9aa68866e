"""Facts of the lanes: when commands end, in which order, and that each op ends once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.config import Transfer, require
from refimpl.messages import (
    BackedUp,
    BackUp,
    BatchDone,
    CancelFetch,
    CloseStorage,
    Command,
    CutBatch,
    EmptyStorage,
    Event,
    Fetch,
    Fetched,
    Landed,
    Load,
    OpenStorage,
    PrefillItem,
    Probe,
    Probed,
    Reply,
    RunBatch,
    StorageClosed,
    StorageEmptied,
    StorageOpened,
    Store,
    Stored,
    Withdraw,
)
from refimpl.run.cost import Cost
from refimpl.run.faults import KINDS, Faults
from refimpl.run.hardware import hardware_named, model_named
from refimpl.run.lanes import LaneExecutor
from refimpl.run.store import SharedStore
from refimpl.units import NS_PER_MS

COST = Cost(hardware_named("h200"), model_named("llama-3.1-8b"), 1, Transfer(), 64)


class FlatCost(Cost):
    """Everything takes 10 ns, so that things end at the same time."""

    def __init__(self) -> None:
        super().__init__(COST.hardware, COST.model, 1, COST.transfer, 64)

    def prefill_ns(self, items: object, load_pages: int = 0) -> int:
        del items, load_pages
        return 10

    def decode_ns(self, running: int, context_tokens: int, steps: int) -> int:
        del running, context_tokens
        return 10 * steps

    def backup_ns(self, pages: int) -> int:
        del pages
        return 10

    def probe_ns(self, keys: int) -> int:
        del keys
        return 10

    def fetch_batch_ns(self, pages: int) -> int:
        del pages
        return 10

    def store_batch_ns(self, pages: int) -> int:
        del pages
        return 10


def keys(count: int, document: int = 0) -> list[bytes]:
    return [f"{document}/{page}".encode().ljust(32) for page in range(count)]


def stored(count: int, document: int = 0) -> SharedStore:
    store = SharedStore()
    for key in keys(count, document):
        store.put([key])
    return store


def lanes_of(
    store: SharedStore | None = None, faults: str = "", cost: Cost = COST, seed: int = 0
) -> LaneExecutor:
    return LaneExecutor(cost, store, Faults.parse(faults, seed))


def drain(lanes: LaneExecutor) -> list[tuple[int, Event]]:
    """All that is still to come, with its time."""
    log: list[tuple[int, Event]] = []
    while (due := lanes.next_due()) is not None:
        log.extend((due, event) for event in lanes.pop_due(due))
    return log


def prefill(*loads: Load, tokens: int = 1000) -> RunBatch:
    return RunBatch(1, [PrefillItem(1, 0, tokens, is_last=True)], loads=list(loads))


def decode(steps: int = 100) -> RunBatch:
    return RunBatch(steps, running=8, context_tokens=8000)


def back_up(op: int, pages: int = 10) -> BackUp:
    return BackUp(op, list(range(pages)), list(range(pages)))


def fetch(op: int, pages: int, document: int = 0) -> Fetch:
    return Fetch(op, keys(pages, document), list(range(pages)))


def store_of(op: int, pages: int, document: int = 0) -> Store:
    return Store(op, keys(pages, document), list(range(pages)))


# ---- the device ---------------------------------------------------------------------------------


def test_a_prefill_ends_after_its_cost_with_its_loads_beside_it() -> None:
    lanes = lanes_of()
    lanes.submit(prefill(Load(1, [0, 1], [0, 1]), Load(2, [2], [2])), 7)
    assert drain(lanes) == [(7 + COST.prefill_ns([(0, 1000)], 3), BatchDone(1))]


def test_a_second_batch_in_flight_is_caught() -> None:
    lanes = lanes_of()
    lanes.submit(decode(), 0)
    with pytest.raises(AssertionError, match="a batch is in flight"):
        lanes.submit(decode(), 0)


def test_a_withdrawal_takes_lanes_no_time() -> None:
    lanes = lanes_of()
    lanes.submit(Withdraw(3), 0)
    assert lanes.is_idle


def test_a_decode_runs_all_its_steps() -> None:
    lanes = lanes_of()
    lanes.submit(decode(100), 5)
    assert drain(lanes) == [(5 + COST.decode_ns(8, 8000, 100), BatchDone(100))]


@pytest.mark.parametrize(
    ("past_boundary", "steps"), [(-1, 40), (0, 40), (1, 41)], ids=["before", "at", "after"]
)
def test_a_cut_ends_a_decode_at_its_next_step_boundary(past_boundary: int, steps: int) -> None:
    lanes = lanes_of()
    lanes.submit(decode(100), 5)
    lanes.submit(CutBatch(), 5 + COST.decode_ns(8, 8000, 40) + past_boundary)
    assert drain(lanes) == [(5 + COST.decode_ns(8, 8000, steps), BatchDone(steps))]


def test_a_decode_cut_at_once_runs_one_step() -> None:
    lanes = lanes_of()
    lanes.submit(decode(100), 5)
    lanes.submit(CutBatch(), 5)
    assert drain(lanes) == [(5 + COST.decode_ns(8, 8000, 1), BatchDone(1))]


def test_a_second_cut_makes_a_decode_no_longer() -> None:
    lanes = lanes_of()
    lanes.submit(decode(100), 0)
    lanes.submit(CutBatch(), 1)
    lanes.submit(CutBatch(), COST.decode_ns(8, 8000, 1))
    assert drain(lanes) == [(COST.decode_ns(8, 8000, 1), BatchDone(1))]


def test_only_a_decode_in_flight_can_be_cut() -> None:
    lanes = lanes_of()
    with pytest.raises(AssertionError, match="no decode is in flight"):
        lanes.submit(CutBatch(), 0)
    lanes.submit(prefill(), 0)
    with pytest.raises(AssertionError, match="can't be cut"):
        lanes.submit(CutBatch(), 0)


def test_a_failed_load_names_its_request_and_not_that_of_the_next_batch() -> None:
    faults = Faults.parse("load_fail=1000000")
    lanes = LaneExecutor(COST, None, faults)
    lanes.submit(prefill(Load(5, [0], [0]), Load(6, [1], [1])), 0)
    [(now, done)] = drain(lanes)
    assert done == BatchDone(1, (5, 6))
    faults.stop()
    lanes.submit(decode(1), now)
    assert [event for _, event in drain(lanes)] == [BatchDone(1)]


def test_backups_go_down_one_after_another_beside_the_batch() -> None:
    lanes = lanes_of()
    lanes.submit(decode(1000), 0)
    lanes.submit(back_up(1, 10), 0)
    lanes.submit(back_up(2, 30), 0)
    first = COST.backup_ns(10)
    second = first + COST.backup_ns(30)
    assert drain(lanes)[:2] == [(first, BackedUp(1, 10)), (second, BackedUp(2, 30))]


# ---- L3 -----------------------------------------------------------------------------------------


def test_a_probe_answers_with_the_leading_run() -> None:
    lanes = lanes_of(stored(5))
    lanes.submit(Probe(1, 1, keys(9)), 0)
    assert drain(lanes) == [(COST.probe_ns(9), Probed(1, 5))]


def test_an_empty_store_is_shared_too() -> None:
    store = SharedStore()
    lanes = lanes_of(store)
    lanes.submit(store_of(1, 3), 0)
    drain(lanes)
    assert len(store) == 3


def test_a_probe_sees_what_another_instance_stored_meanwhile() -> None:
    store = SharedStore()
    lanes = lanes_of(store)
    lanes.submit(Probe(1, 1, keys(9)), 0)
    store.put(keys(1))
    assert drain(lanes)[0][1] == Probed(1, 1)


def test_a_fetch_lands_batch_by_batch_and_its_last_batch_completes_it() -> None:
    lanes = lanes_of(stored(300))
    lanes.submit(fetch(1, 300), 0)
    batch, rest = COST.fetch_batch_ns(128), COST.fetch_batch_ns(44)
    assert drain(lanes) == [
        (batch, Landed(1, 128)),
        (2 * batch, Landed(1, 256)),
        (2 * batch + rest, Fetched(1, 300)),
    ]


def test_a_fetch_ends_before_a_page_that_is_gone() -> None:
    lanes = lanes_of(stored(200))
    lanes.submit(fetch(1, 300), 0)
    assert [event for _, event in drain(lanes)] == [Landed(1, 128), Fetched(1, 200)]


def test_a_small_fetch_is_not_starved_by_a_huge_one() -> None:
    """F15: 2,000 pages, then 20."""
    lanes = lanes_of(stored(2000))
    lanes.submit(fetch(1, 2000), 0)
    lanes.submit(fetch(2, 20), 1)
    log = drain(lanes)
    ends = {event.op: time for time, event in log if isinstance(event, Fetched)}
    assert ends[2] == COST.fetch_batch_ns(128) + COST.fetch_batch_ns(20)
    assert ends[1] == 15 * COST.fetch_batch_ns(128) + COST.fetch_batch_ns(80) + (
        COST.fetch_batch_ns(20)
    )


def test_open_fetches_take_turns() -> None:
    store = stored(300)
    lanes = lanes_of(store)
    lanes.submit(fetch(1, 300), 0)
    lanes.submit(fetch(2, 300), 0)
    order = [event.op for _, event in drain(lanes) if isinstance(event, Landed | Fetched)]
    assert order == [1, 2, 1, 2, 1, 2]


def test_a_cancelled_fetch_ends_with_the_batch_in_progress() -> None:
    lanes = lanes_of(stored(300))
    lanes.submit(fetch(1, 300), 0)
    lanes.submit(CancelFetch(1), 10)
    assert drain(lanes) == [(COST.fetch_batch_ns(128), Fetched(1, 128))]


def test_a_cancelled_fetch_with_no_batch_in_progress_ends_at_once() -> None:
    lanes = lanes_of(stored(300))
    lanes.submit(fetch(1, 300), 0)
    lanes.submit(fetch(2, 300), 0)
    batch = COST.fetch_batch_ns(128)
    assert lanes.pop_due(batch) == [Landed(1, 128)]  # the batch of op 2 is in progress now
    lanes.submit(CancelFetch(1), batch + 5)
    assert lanes.next_due() == batch + 5
    assert lanes.pop_due(batch + 5) == [Fetched(1, 128)]
    assert drain(lanes)[0] == (2 * batch, Landed(2, 128))


def test_a_fetch_cancelled_before_its_first_batch_brings_nothing() -> None:
    lanes = lanes_of(stored(300))
    lanes.submit(fetch(1, 300), 0)
    lanes.submit(fetch(2, 300), 0)
    lanes.submit(CancelFetch(2), 0)
    assert lanes.pop_due(0) == [Fetched(2, 0)]


def test_only_an_open_fetch_can_be_cancelled_and_only_once() -> None:
    lanes = lanes_of(stored(9))
    with pytest.raises(AssertionError, match="not open"):
        lanes.submit(CancelFetch(1), 0)
    lanes.submit(fetch(1, 9), 0)
    lanes.submit(CancelFetch(1), 0)
    with pytest.raises(AssertionError, match="cancelled twice"):
        lanes.submit(CancelFetch(1), 0)


def test_a_stored_page_is_readable_when_its_batch_has_ended() -> None:
    store = SharedStore()
    writer, reader = lanes_of(store), lanes_of(store)
    writer.submit(store_of(1, 200), 0)
    due = writer.next_due()
    assert due == COST.probe_ns(128) + COST.store_batch_ns(128)
    reader.submit(Probe(9, 9, keys(200)), 0)
    assert reader.pop_due(COST.probe_ns(200)) == [Probed(9, 0)]
    assert writer.pop_due(due) == []  # nothing for the writer's engine to handle
    reader.submit(Probe(10, 9, keys(200)), due)
    assert [event for _, event in drain(reader)] == [Probed(10, 128)]
    assert [event for _, event in drain(writer)] == [Stored(1, 200)]


def test_pages_that_exist_are_not_sent_again() -> None:
    store = stored(100)
    lanes = lanes_of(store)
    lanes.submit(store_of(1, 128), 0)
    lanes.submit(store_of(2, 128), 0)
    first = COST.probe_ns(128) + COST.store_batch_ns(28)
    assert drain(lanes) == [(first, Stored(1, 128)), (first + COST.probe_ns(128), Stored(2, 128))]
    assert (store.puts, store.puts_existing, store.puts_skipped) == (128, 0, 228)


def test_two_instances_that_send_the_same_page_at_once_are_counted() -> None:
    store = SharedStore()
    one, two = lanes_of(store), lanes_of(store)
    one.submit(store_of(1, 5), 0)
    two.submit(store_of(1, 5), 0)
    drain(one)
    drain(two)
    assert (store.puts, store.puts_existing, len(store)) == (10, 5, 5)


# ---- opening and closing ------------------------------------------------------------------------


def test_opening_another_backend_changes_what_l3_costs() -> None:
    lanes = lanes_of()
    lanes.submit(OpenStorage("mooncake"), 0)
    assert lanes.cost.storage.name == "memory"
    assert drain(lanes) == [(COST.with_storage("mooncake").open_ns, StorageOpened())]
    assert lanes.cost.storage.name == "mooncake"


@pytest.mark.parametrize(
    ("backend", "faults", "error"),
    [("abacus", "", "'abacus' is unknown"), ("file", "open_fail=1000000", "did not open")],
)
def test_a_backend_that_does_not_open_changes_nothing(
    backend: str, faults: str, error: str
) -> None:
    lanes = lanes_of(faults=faults)
    lanes.submit(OpenStorage(backend), 0)
    [(_, opened)] = drain(lanes)
    assert isinstance(opened, StorageOpened)
    assert error in opened.error
    assert lanes.cost is COST


def capacity(_: str, extra_config: str) -> int | None:
    """The config is a number of pages here, or nothing."""
    require(extra_config != "0", "too small")
    return int(extra_config) if extra_config else None


def test_a_store_holds_what_the_config_it_was_opened_with_allows() -> None:
    store = stored(8)
    lanes = LaneExecutor(COST, store, capacity=capacity)
    lanes.submit(OpenStorage("file", "3"), 0)
    drain(lanes)
    assert [key in store for key in keys(8)] == [False] * 5 + [True] * 3
    store.put(keys(2, document=1))
    assert len(store) == 3
    lanes.submit(OpenStorage("file"), COST.with_storage("file").open_ns)
    drain(lanes)
    store.put(keys(8))
    assert len(store) == 10


def test_a_size_that_holds_no_page_opens_nothing() -> None:
    store = stored(8)
    lanes = LaneExecutor(COST, store, capacity=capacity)
    lanes.submit(OpenStorage("file", "0"), 0)
    [(_, opened)] = drain(lanes)
    assert opened == StorageOpened("too small")
    assert len(store) == 8


def test_closing_answers_once_and_may_fail() -> None:
    for faults, failed in (("", False), ("close_fail=1000000", True)):
        lanes = lanes_of(faults=faults)
        lanes.submit(CloseStorage(), 0)
        [(_, closed)] = drain(lanes)
        assert isinstance(closed, StorageClosed)
        assert bool(closed.error) == failed


def test_the_backend_is_opened_or_closed_one_at_a_time() -> None:
    lanes = lanes_of()
    lanes.submit(OpenStorage("file"), 0)
    with pytest.raises(AssertionError, match="being opened, cleared or closed"):
        lanes.submit(CloseStorage(), 0)


def test_a_clear_empties_the_store_and_takes_as_long_as_a_close() -> None:
    store = stored(2)
    lanes = lanes_of(store)
    lanes.submit(EmptyStorage(), 0)
    assert len(store) == 2
    assert drain(lanes) == [(COST.close_ns, StorageEmptied())]
    assert len(store) == 0


# ---- faults -------------------------------------------------------------------------------------


def outcome(command: Command, faults: str, pages: int = 300) -> list[Event]:
    lanes = lanes_of(stored(pages), faults)
    lanes.submit(command, 0)
    return [event for _, event in drain(lanes)]


def test_a_failed_probe_found_nothing() -> None:
    assert outcome(Probe(1, 1, keys(9)), "probe_fail=1000000") == [Probed(1, 0)]


def test_a_failed_fetch_brings_nothing() -> None:
    assert outcome(fetch(1, 300), "fetch_fail=1000000") == [Fetched(1, 0)]


def test_a_vanished_page_is_found_and_not_read() -> None:
    assert outcome(Probe(1, 1, keys(9)), "vanish=1000000") == [Probed(1, 9)]
    assert outcome(fetch(1, 9), "vanish=1000000") == [Fetched(1, 0)]


@pytest.mark.parametrize(
    ("fault", "command"),
    [
        ("fetch_short", fetch(1, 100)),
        ("store_fail", store_of(1, 100)),
        ("backup_fail", back_up(1, 100)),
    ],
)
def test_a_part_that_fails_leaves_its_first_pages(fault: str, command: Command) -> None:
    done = set()
    for seed in range(40):
        store = stored(100) if isinstance(command, Fetch) else SharedStore()
        lanes = lanes_of(store, f"{fault}=1000000", seed=seed)
        lanes.submit(command, 0)
        [(_, event)] = drain(lanes)
        assert isinstance(event, Fetched | Stored | BackedUp)
        done.add(event.pages)
    assert max(done) < 100
    assert len(done) > 10


def test_a_store_that_fails_wrote_what_it_says() -> None:
    store = SharedStore()
    lanes = lanes_of(store, "store_fail=1000000", seed=3)
    lanes.submit(store_of(1, 100), 0)
    [(_, event)] = drain(lanes)
    assert event == Stored(1, len(store))
    assert 0 < store.leading_run(keys(100)) == len(store)


def test_after_a_failed_store_the_next_starts_at_its_own_beginning() -> None:
    faults = Faults.parse("store_fail=1000000", 3)
    lanes = LaneExecutor(COST, None, faults)
    lanes.submit(store_of(1, 100), 0)
    lanes.submit(store_of(2, 50, document=1), 0)
    due = lanes.next_due()
    assert due is not None
    lanes.pop_due(due)
    faults.stop()
    assert [event for _, event in drain(lanes)] == [Stored(2, 50)]


def test_a_delayed_op_takes_that_much_longer() -> None:
    lanes = lanes_of(stored(9), "delay=1000000:5ms")
    lanes.submit(fetch(1, 9), 0)
    assert drain(lanes) == [(COST.fetch_batch_ns(9) + 5 * NS_PER_MS, Fetched(1, 9))]


# ---- order and contract -------------------------------------------------------------------------


def test_what_ends_at_the_same_time_comes_in_the_order_of_lanes() -> None:
    lanes = lanes_of(stored(10), cost=FlatCost())
    for command in (
        OpenStorage("memory"),
        fetch(4, 10),
        Probe(3, 1, keys(2)),
        back_up(2),
        decode(1),
    ):
        lanes.submit(command, COST.open_ns - 10 if not isinstance(command, OpenStorage) else 0)
    kinds = [type(event) for event in lanes.pop_due(COST.open_ns)]
    assert kinds == [BatchDone, BackedUp, Probed, Fetched, StorageOpened]


def test_fetches_that_end_at_the_same_time_come_in_the_order_of_their_ops() -> None:
    lanes = lanes_of(stored(300), cost=FlatCost())
    for op in (5, 9, 7, 8):
        lanes.submit(fetch(op, 10), 0)
    for op in (8, 9, 7):
        lanes.submit(CancelFetch(op), 10)
    assert [event.op for event in lanes.pop_due(10) if isinstance(event, Fetched)] == [5, 7, 8, 9]


def test_popping_takes_the_earliest_time_alone() -> None:
    lanes = lanes_of(cost=FlatCost())
    lanes.submit(back_up(1), 0)
    lanes.submit(decode(1), 1)
    assert lanes.pop_due(9) == []
    assert lanes.pop_due(10**9) == [BackedUp(1, 10)]
    assert lanes.next_due() == 11


def test_an_op_that_is_open_is_not_opened_again() -> None:
    lanes = lanes_of()
    lanes.submit(back_up(1), 0)
    with pytest.raises(AssertionError, match="already open"):
        lanes.submit(Probe(1, 1, keys(1)), 0)


def test_an_op_is_open_until_it_completes_and_no_longer() -> None:
    lanes = lanes_of()
    lanes.submit(back_up(1), 0)
    [(now, _)] = drain(lanes)
    lanes.submit(back_up(1), now)
    assert [event for _, event in drain(lanes)] == [BackedUp(1, 10)]


def test_time_does_not_go_back() -> None:
    lanes = lanes_of()
    lanes.submit(back_up(1), 10)
    with pytest.raises(AssertionError, match="time went back"):
        lanes.submit(back_up(2), 9)


def test_a_completion_that_was_not_popped_is_caught() -> None:
    lanes = lanes_of()
    lanes.submit(back_up(1), 0)
    with pytest.raises(AssertionError, match="not popped"):
        lanes.submit(back_up(2), COST.backup_ns(10) + 1)


def test_a_reply_is_no_work_for_lanes() -> None:
    with pytest.raises(AssertionError, match="do not serve"):
        lanes_of().submit(Reply(1, first=True), 0)


def test_lanes_report_what_they_moved_and_how_long() -> None:
    lanes = lanes_of(stored(20))
    lanes.submit(prefill(Load(1, [0, 1], [0, 1])), 0)
    lanes.submit(back_up(1, 10), 0)
    lanes.submit(fetch(2, 20), 0)
    drain(lanes)
    use = {lane.name: (lane.pages, lane.busy_ns) for lane in lanes.use()}
    assert use["host_up"] == (2, COST.load_ns(2))
    assert use["host_down"] == (10, COST.backup_ns(10))
    assert use["l3_read"] == (20, COST.fetch_batch_ns(20))
    assert use["l3_write"] == (0, 0)


Action = tuple[str, int, int]  # what, how many pages, how much later

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["back_up", "probe", "fetch", "store", "cancel", "decode", "cut", "pop"]),
        st.integers(1, 400),
        st.sampled_from([0, 0, 1, 9, 10, 11, 10**6]),
    ),
    max_size=60,
)


class Run:
    """Carries out actions as a well-behaved engine would, and checks what comes back."""

    def __init__(self, cost: Cost, faults: str, seed: int) -> None:
        self.lanes = lanes_of(stored(150), faults, cost, seed)
        self.now = 0
        self.open: dict[int, tuple[type[Event], int]] = {}  # completion and pages at most
        self.landed: dict[int, int] = {}
        self.cancelled: list[int] = []
        self.is_decoding = False
        self.log: list[tuple[int, Event]] = []

    def advance(self, until: int) -> None:
        while (due := self.lanes.next_due()) is not None and due <= until:
            assert due >= self.now
            self.now = due
            for event in self.lanes.pop_due(due):
                self.check(event)
        self.now = until

    def check(self, event: Event) -> None:
        self.log.append((self.now, event))
        match event:
            case BatchDone():
                assert self.is_decoding
                self.is_decoding = False
            case Landed():
                assert self.landed[event.op] < event.pages < self.open[event.op][1]
                assert event.op not in self.cancelled
                self.landed[event.op] = event.pages
            case BackedUp() | Probed() | Fetched() | Stored():
                kind, pages = self.open.pop(event.op)
                assert type(event) is kind
                assert self.landed.get(event.op, 0) <= event.pages <= pages

    def act(self, index: int, action: Action) -> None:
        what, pages, later = action
        self.advance(self.now + later)
        command = self.command(index, what, pages)
        if command is not None:
            self.lanes.submit(command, self.now)

    def command(self, op: int, what: str, pages: int) -> Command | None:
        document = op % 2
        match what:
            case "back_up":
                self.open[op] = (BackedUp, pages)
                return back_up(op, pages)
            case "probe":
                self.open[op] = (Probed, pages)
                return Probe(op, op, keys(pages, document))
            case "fetch":
                self.open[op], self.landed[op] = (Fetched, pages), 0
                return fetch(op, pages, document)
            case "store":
                self.open[op] = (Stored, pages)
                return store_of(op, pages, document)
            case "cancel":
                return self.cancel(pages)
            case "decode" if not self.is_decoding:
                self.is_decoding = True
                return decode(pages)
            case "cut" if self.is_decoding:
                return CutBatch()
        return None

    def cancel(self, number: int) -> Command | None:
        fetches = [op for op in self.landed if op in self.open and op not in self.cancelled]
        if not fetches:
            return None
        self.cancelled.append(fetches[number % len(fetches)])
        return CancelFetch(self.cancelled[-1])

    def all_of(self, actions: list[Action]) -> list[tuple[int, Event]]:
        for index, action in enumerate(actions):
            self.act(index, action)
        while (due := self.lanes.next_due()) is not None:
            self.advance(due)
        return self.log


FAULTS = ",".join(
    f"{kind}=300000" + (":7ns" if kind == "delay" else "") for kind in KINDS if kind != "load_fail"
)


@given(ACTIONS, st.booleans(), st.sampled_from(["", FAULTS]), st.integers(0, 100))
def test_every_op_ends_exactly_once_in_any_order_and_all_comes_to_rest(
    actions: list[Action], is_flat: bool, faults: str, seed: int
) -> None:
    run = Run(FlatCost() if is_flat else COST, faults, seed)
    run.all_of(actions)
    assert run.open == {}
    assert not run.is_decoding
    assert run.lanes.is_idle


@given(ACTIONS, st.integers(0, 100))
def test_the_same_seed_gives_the_same_events_at_the_same_times(
    actions: list[Action], seed: int
) -> None:
    logs = [Run(FlatCost(), FAULTS, seed).all_of(actions) for _ in range(2)]
    assert logs[0] == logs[1]


@given(ACTIONS)
def test_completions_are_ordered_by_time_then_lane_then_op(actions: list[Action]) -> None:
    lane = {BatchDone: 0, BackedUp: 1, Probed: 2, Landed: 3, Fetched: 3, Stored: 4}
    run = Run(FlatCost(), "", 0)
    popped: list[list[tuple[int, int]]] = []
    pop = run.lanes.pop_due

    def recording(now: int) -> list[Event]:
        events = pop(now)
        popped.append([(lane[type(event)], getattr(event, "op", 0)) for event in events])
        return events

    run.lanes.pop_due = recording  # type: ignore[method-assign]
    run.all_of(actions)
    assert all(order == sorted(order) for order in popped)
