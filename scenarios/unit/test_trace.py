"""Public traces: what each format becomes, and the one line that says what is wrong with one."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import refimpl
from refimpl.config import ConfigError
from refimpl.keys import BlockPrompt
from refimpl.units import NS_PER_MS, NS_PER_S
from refimpl.workload.digest import workload_digest
from refimpl.workload.request import RequestSpec, Workload
from refimpl.workload.trace import read_trace
from refimpl.workload.trace_lines import TraceError

Write = Callable[..., Path]

MOONCAKE_LINE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": '
    "[46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}"
)
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURSTGPT_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write lines as a trace file."""

    def to_file(*lines: str, name: str = "trace.txt") -> Path:
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return to_file


def mooncake(at: object = 0, length: object = 600, out: object = 1, ids: object = (1, 2)) -> str:
    line = {"timestamp": at, "input_length": length, "output_length": out, "hash_ids": ids}
    return json.dumps(line)


def bailian(
    chat: int, parent: int, at: str, length: int, out: int, ids: list[int], turn: int = 1
) -> str:
    return (
        f'{{"chat_id": {chat}, "parent_chat_id": {parent}, "timestamp": {at}, "type": "text",'
        f' "input_length": {length}, "output_length": {out}, "turn": {turn}, "hash_ids": {ids}}}'
    )


def blocks(request: RequestSpec) -> BlockPrompt:
    assert isinstance(request.prompt, BlockPrompt)
    return request.prompt


def arrivals(workload: Workload) -> list[int]:
    return [request.arrival_ns for request in workload.requests]


def complaint(path: Path, trace_format: str) -> str:
    """``LINE: reason`` of the one line with which ``path`` is refused."""
    with pytest.raises(TraceError) as caught:
        read_trace(path, trace_format)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"{path}:")
    return message.removeprefix(f"{path}:")


# ---- Mooncake ----------------------------------------------------------------------------------


def test_a_mooncake_line_becomes_a_request_of_512_token_blocks(write: Write) -> None:
    workload = read_trace(write(MOONCAKE_LINE), "mooncake")
    (request,) = workload.requests
    assert blocks(request) == BlockPrompt(6955, (*range(46, 58), 2353, 2354), 512)
    assert (request.rid, request.output_tokens, request.after) == (1, 52, ())
    assert (workload.block_size, workload.parallel_max, workload.name) == (512, None, "trace.txt")


def test_requests_are_sent_by_their_time_from_the_first(write: Write) -> None:
    path = write(mooncake(27482), mooncake(27482), mooncake(30482))
    assert arrivals(read_trace(path, "mooncake")) == [0, 0, 3 * NS_PER_S]


def test_lines_out_of_order_are_sorted_and_ties_keep_the_order_of_the_file(write: Write) -> None:
    path = write(mooncake(9, out=1), mooncake(3, out=2), mooncake(9, out=3), mooncake(3, out=4))
    requests = read_trace(path, "mooncake").requests
    assert [request.output_tokens for request in requests] == [2, 4, 1, 3]
    assert [request.rid for request in requests] == [1, 2, 3, 4]
    assert [request.arrival_ns for request in requests] == [0, 0, 6 * NS_PER_MS, 6 * NS_PER_MS]


def test_a_timestamp_no_float_can_hold_keeps_every_nanosecond(write: Write) -> None:
    first, second = mooncake(1), mooncake(1)
    first = first.replace('"timestamp": 1', '"timestamp": 9007199254.000001')
    second = second.replace('"timestamp": 1', '"timestamp": 9007199254.000002')
    assert arrivals(read_trace(write(first, second), "mooncake")) == [0, 1]


def test_unknown_fields_and_blank_lines_are_skipped(write: Write) -> None:
    line = mooncake().replace("{", '{"note": {"a": [1]}, ', 1)
    assert len(read_trace(write("", line, "  ", mooncake(), ""), "mooncake").requests) == 2


def test_a_limit_reads_the_first_lines_and_no_further(write: Write) -> None:
    path = write(mooncake(5), mooncake(2), "not read")
    assert arrivals(read_trace(path, "mooncake", limit=2)) == [0, 3 * NS_PER_MS]


def test_prompts_with_equal_leading_blocks_share_those_pages(write: Write) -> None:
    path = write(mooncake(ids=(1, 2), length=1024), mooncake(ids=(1, 3), length=1024))
    left, right = (r.prompt.page_keys(512, b"") for r in read_trace(path, "mooncake").requests)
    assert left[0] == right[0]
    assert left[1] != right[1]


def hit_tokens(workload: Workload, page_size: int) -> int:
    """Prompt tokens found in a cache without a limit that keeps every full prompt page."""
    cached: dict[bytes, None] = {}
    total = 0
    for request in workload.requests:
        keys = request.prompt.page_keys(page_size, b"")
        found = 0
        while found < len(keys) and keys[found] in cached:
            found += 1
        total += min(found, (request.prompt.length - 1) // page_size) * page_size
        cached.update(dict.fromkeys(keys))
    return total


def test_six_requests_by_hand_hit_what_was_counted_by_hand(write: Write) -> None:
    path = write(
        mooncake(0, 1024, ids=(1, 2)),  # 0: the cache is empty
        mooncake(1, 1025, ids=(1, 2, 3)),  # 1024: both full blocks
        mooncake(2, 1024, ids=(1, 2)),  # 512: the last token must be computed, and with it its page
        mooncake(3, 600, ids=(1, 4)),  # 512: the partial block is never a page
        mooncake(4, 600, ids=(1, 4)),  # 512: so it is not found again
        mooncake(5, 1024, ids=(5, 2)),  # 0: another prefix
    )
    assert hit_tokens(read_trace(path, "mooncake"), 512) == 2560


# ---- Bailian -----------------------------------------------------------------------------------


def test_a_turn_waits_for_its_parent_and_continues_its_session(write: Write) -> None:
    path = write(
        bailian(55, -1, "60", 16, 4, [1]),
        bailian(77, -1, "60.5", 16, 4, [9]),
        bailian(159, 55, "61.114", 40, 4, [1, 2, 3], turn=2),
    )
    requests = read_trace(path, "bailian").requests
    assert [request.after for request in requests] == [(), (), (1,)]
    assert [request.session for request in requests] == [0, 1, 0]
    assert [request.turn for request in requests] == [0, 0, 1]
    assert [request.arrival_ns for request in requests] == [0, 500_000_000, 1_114_000_000]


def test_qwen_is_another_name_of_bailian(write: Write) -> None:
    path = write(bailian(1, -1, "0", 16, 4, [1]))
    assert read_trace(path, "qwen") == read_trace(path, "bailian")


@pytest.mark.parametrize("length", [16, 20, 31, 32])
@pytest.mark.parametrize("output", [1, 12, 16, 33, 48])
def test_a_child_finds_every_full_page_of_its_parents_output(
    write: Write, length: int, output: int
) -> None:
    own = list(range(1, -(-length // 16) + 1))
    full = length // 16
    child_ids = own[:full] + list(range(101, 111))
    path = write(
        bailian(1, -1, "0", length, output, own),
        bailian(2, 1, "1", len(child_ids) * 16, 1, child_ids),
    )
    parent, child = read_trace(path, "bailian").requests
    names = parent.prompt.page_keys(16, b"")
    while len(names) < (length + output) // 16:
        names.append(parent.prompt.output_key(len(names), 16, b"", parent.rid, array("I")))
    assert names == child.prompt.page_keys(16, b"")[: len(names)]


def test_two_children_of_one_parent_both_find_its_output(write: Write) -> None:
    path = write(
        bailian(1, -1, "0", 16, 32, [1]),
        bailian(2, 1, "1", 64, 1, [1, 2, 3, 4]),
        bailian(3, 1, "2", 64, 1, [1, 2, 3, 5]),
    )
    parent = read_trace(path, "bailian").requests[0]
    assert blocks(parent).block_ids == (1, 2, 3)


def test_a_child_that_rewrote_the_history_names_nothing(write: Write) -> None:
    path = write(bailian(1, -1, "0", 16, 32, [1]), bailian(2, 1, "1", 64, 1, [7, 2, 3, 4]))
    requests = read_trace(path, "bailian").requests
    assert not blocks(requests[0]).output_is_linked
    assert requests[1].after == (1,)


def test_a_parent_outside_the_trace_is_no_parent(write: Write) -> None:
    (request,) = read_trace(write(bailian(2, 1, "1", 16, 1, [7], turn=3)), "bailian").requests
    assert (request.after, request.turn) == ((), 2)


def test_parents_in_a_circle_do_not_wait_for_each_other(write: Write) -> None:
    path = write(bailian(1, 2, "0", 16, 1, [1]), bailian(2, 1, "0", 16, 1, [1]))
    requests = read_trace(path, "bailian").requests
    assert [request.after for request in requests] == [(), (1,)]


def test_a_chat_that_is_its_own_parent_is_malformed(write: Write) -> None:
    path = write(bailian(1, 1, "0", 16, 1, [1]))
    expected = "1: parent_chat_id is the chat_id of the line itself"
    assert complaint(path, "bailian") == expected


# ---- Azure, BurstGPT ---------------------------------------------------------------------------


def test_azure_times_are_exact_to_a_hundred_nanoseconds(write: Write) -> None:
    path = write(
        AZURE_HEADER,
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:46.6805901,396,109",
        "2023-11-17 00:00:00,10,0",
    )
    workload = read_trace(path, "azure")
    midnight = (5 * 3600 + 44 * 60 + 14) * NS_PER_S - 680_590_000
    assert arrivals(workload) == [0, 100, midnight]
    first = workload.requests[0]
    assert (first.prompt.length, first.output_tokens) == (374, 44)


@pytest.mark.parametrize(
    "text", ["2024-05-10T02:00:00", "2024-05-10 02:00:00Z", "2024-05-10 04:00:00.0+02:00"]
)
def test_an_azure_time_may_have_a_zone(write: Write, text: str) -> None:
    path = write(AZURE_HEADER, "2024-05-10 01:00:00+00:00,1,1", f"{text},1,1")
    assert arrivals(read_trace(path, "azure")) == [0, 3600 * NS_PER_S]


def test_a_burstgpt_row_of_the_first_release_is_read(write: Write) -> None:
    path = write(
        BURSTGPT_HEADER,
        "5,ChatGPT,472,18,490,Conversation log",
        "45.25,GPT-4,1087,0,1087,API log",
    )
    requests = read_trace(path, "burstgpt").requests
    assert [(r.prompt.length, r.output_tokens) for r in requests] == [(472, 18), (1087, 0)]
    assert arrivals(read_trace(path, "burstgpt")) == [0, 40_250_000_000]


def test_burstgpt_sessions_count_their_turns_and_wait_for_nothing(write: Write) -> None:
    path = write(
        BURSTGPT_SESSIONS,
        "5,s1,2.5,ChatGPT,472,18,490,Conversation log",
        "6,,,ChatGPT,10,18,28,API log",
        '7,s1,1,"ChatGPT",500,18,518,Conversation log',
        "8,,,ChatGPT,10,18,28,API log",
    )
    requests = read_trace(path, "burstgpt").requests
    assert [(r.session, r.turn) for r in requests] == [(0, 0), (1, 0), (0, 1), (2, 0)]
    assert all(request.after == () for request in requests)


@pytest.mark.parametrize("page", [1, 16, 64])
def test_prompts_of_a_trace_without_blocks_never_share(write: Write, page: int) -> None:
    path = write(AZURE_HEADER, *["2023-11-16 18:15:46.68,130,44"] * 3)
    workload = read_trace(path, "azure")
    keys = [key for request in workload.requests for key in request.prompt.page_keys(page, b"")]
    assert len(dict.fromkeys(keys)) == len(keys) == 3 * (130 // page)
    assert (workload.hides_sharing, workload.block_size) == (True, None)
    assert not any(blocks(request).output_is_linked for request in workload.requests)


def test_the_columns_may_stand_in_any_order(write: Write) -> None:
    path = write("GeneratedTokens, TIMESTAMP,ContextTokens", "44,2023-11-16 18:15:46,374")
    (request,) = read_trace(path, "azure").requests
    assert (request.prompt.length, request.output_tokens) == (374, 44)


# ---- malformed lines ---------------------------------------------------------------------------


def test_a_malformed_line_names_file_line_and_reason(write: Write) -> None:
    path = write(mooncake(), "", "{oops", name="bad.jsonl")
    with pytest.raises(ConfigError) as caught:
        read_trace(path, "mooncake")
    reason = "not JSON: JSON is malformed: object keys must be strings (byte 1)"
    assert str(caught.value) == f"{path}:3: {reason}"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON: Input data was truncated"),
        (mooncake() + "x", "not JSON: JSON is malformed: trailing characters (byte 78)"),
        ("[]", "Expected object, got array"),
        ("{}", "Object missing required field timestamp"),
        ('{"timestamp": 1}', "Object missing required field input_length"),
        (mooncake(at=-1), "the timestamp is negative"),
        (mooncake(at="1"), "the timestamp is not a decimal number"),
        (mooncake(at=None), "the timestamp is not a decimal number"),
        (mooncake(at=10**30), "the timestamp is above 4611686018427387903 ns"),
        (mooncake(length="600"), "input_length: Expected int, got str"),
        (mooncake(length=600.5), "input_length: Expected int, got float"),
        (mooncake(length=True), "input_length: Expected int, got bool"),
        (mooncake(length=0), "input_length: Expected int >= 1"),
        (mooncake(length=-5), "input_length: Expected int >= 1"),
        (mooncake(length=2**31 + 1), "input_length: Expected int <= 2147483648"),
        (mooncake(length=10**4000), "input_length: Expected int <= 2147483648"),
        (mooncake(out=-1), "output_length: Expected int >= 0"),
        (mooncake(out=2**31 + 1), "output_length: Expected int <= 2147483648"),
        (mooncake(ids=7), "hash_ids: Expected array, got int"),
        (mooncake(ids=[1, "2"]), "hash_ids[1]: Expected int, got str"),
        (mooncake(ids=[1, -2]), "hash_ids[1]: Expected int >= 0"),
        (mooncake(ids=[1]), "hash_ids: 1 ids where 600 tokens fill 2 blocks of 512"),
        (mooncake(ids=[1, 2, 3]), "hash_ids: 3 ids where 600 tokens fill 2 blocks of 512"),
    ],
)
def test_a_mooncake_line_is_refused_for_the_reason_it_gives(
    write: Write, line: str, reason: str
) -> None:
    assert complaint(write(line), "mooncake") == f"1: {reason}"


def test_json_nested_without_end_is_refused(write: Write) -> None:
    message = complaint(write('{"note": ' + "[" * 100_000), "mooncake")
    assert message.startswith("1: not JSON: ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (bailian(1, -1, "0", 33, 1, [1, 2]), "hash_ids: 2 ids where 33 tokens fill 3 blocks of 16"),
        (bailian(-1, -1, "0", 16, 1, [1]), "chat_id: Expected int >= 0"),
        (bailian(1, -2, "0", 16, 1, [1]), "parent_chat_id: Expected int >= -1"),
        (mooncake(ids=[1]), "Object missing required field chat_id"),
    ],
)
def test_a_bailian_line_is_refused_for_the_reason_it_gives(
    write: Write, line: str, reason: str
) -> None:
    assert complaint(write(line), "bailian") == f"1: {reason}"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:46,1", "2 columns where the header has 3"),
        ("2023-11-16 18:15:46,1,2,3", "4 columns where the header has 3"),
        ("2023-11-16 18:15:46,,2", "ContextTokens: '' is not a whole number"),
        ("2023-11-16 18:15:46,1.5,2", "ContextTokens: '1.5' is not a whole number"),
        ("2023-11-16 18:15:46,0,2", "ContextTokens: 0 is not from 1 to 2147483648"),
        ("2023-11-16 18:15:46,1,-2", "GeneratedTokens: -2 is not from 0 to 2147483648"),
        ("2023-11-16 18:15:46,1,2147483649",
         "GeneratedTokens: 2147483649 is not from 0 to 2147483648"),
        ("2023-13-16 18:15:46,1,2", "TIMESTAMP: month must be in 1..12"),
        ("2023-11-16,1,2", "TIMESTAMP: '2023-11-16' is not a date and time"),
        ("12,1,2", "TIMESTAMP: '12' is not a date and time"),
        ('"2023-11-16 18:15:46,1,2', "not CSV: unexpected end of data"),
    ],
)  # fmt: skip
def test_an_azure_row_is_refused_for_the_reason_it_gives(
    write: Write, row: str, reason: str
) -> None:
    assert complaint(write(AZURE_HEADER, row), "azure") == f"2: {reason}"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("x,m,1,2,3,log", "the timestamp is not a decimal number"),
        ("-1,m,1,2,3,log", "the timestamp is negative"),
        ("1,m,0,2,3,log", "Request tokens: 0 is not from 1 to 2147483648"),
        ("1,m,1,two,3,log", "Response tokens: 'two' is not a whole number"),
    ],
)
def test_a_burstgpt_row_is_refused_for_the_reason_it_gives(
    write: Write, row: str, reason: str
) -> None:
    assert complaint(write(BURSTGPT_HEADER, row), "burstgpt") == f"2: {reason}"


@pytest.mark.parametrize("trace_format", ["azure", "burstgpt"])
def test_a_header_of_another_format_is_refused(write: Write, trace_format: str) -> None:
    assert complaint(write(mooncake()), trace_format).startswith("1: the header lacks the column")


def test_a_header_that_names_a_column_twice_is_refused(write: Write) -> None:
    path = write(AZURE_HEADER + ",TIMESTAMP")
    assert complaint(path, "azure") == "1: the header names a column twice"


@pytest.mark.parametrize("trace_format", ["mooncake", "bailian", "azure", "burstgpt"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(content=st.binary(max_size=60))
def test_any_bytes_are_a_workload_or_one_line_of_complaint(
    tmp_path: Path, trace_format: str, content: bytes
) -> None:
    path = tmp_path / "any"
    path.write_bytes(content)
    complaint(path, trace_format)


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace_format", ["mooncake", "azure"])
@pytest.mark.parametrize("lines", [(), ("", "  ")])
def test_a_file_without_lines_holds_no_request(
    write: Write, trace_format: str, lines: tuple[str, ...]
) -> None:
    assert complaint(write(*lines), trace_format) == "0: holds no request"


def test_a_table_of_a_header_alone_holds_no_request(write: Write) -> None:
    assert complaint(write(AZURE_HEADER), "azure") == "0: holds no request"


def test_a_missing_file_is_line_zero(tmp_path: Path) -> None:
    expected = "0: can't be read: No such file or directory"
    assert complaint(tmp_path / "none", "mooncake") == expected


def test_a_directory_is_no_trace(tmp_path: Path) -> None:
    assert complaint(tmp_path, "mooncake") == "0: can't be read: Is a directory"


def test_bytes_that_are_not_utf8_are_named_by_their_place(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(mooncake().encode() + b'\n{"a": "\xe9"}\n')
    assert complaint(path, "mooncake") == "2: byte 8 is not UTF-8"


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.csv"
    path.write_bytes(f"\ufeff{AZURE_HEADER}\r\n2023-11-16 18:15:46,374,44\r\n".encode())
    assert read_trace(path, "azure").requests[0].output_tokens == 44


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "no-suffix"])
def test_a_gzipped_trace_is_known_by_its_content(tmp_path: Path, write: Write, name: str) -> None:
    plain = write(mooncake(1), mooncake(2))
    zipped = tmp_path / name
    zipped.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    left, right = read_trace(plain, "mooncake"), read_trace(zipped, "mooncake")
    assert workload_digest(left) == workload_digest(right)


def test_a_gzipped_trace_names_the_malformed_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(f"{mooncake()}\n[]\n".encode(), mtime=0))
    assert complaint(path, "mooncake") == "2: Expected object, got array"


@pytest.mark.parametrize("damage", ["cut", "flipped", "appended"])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress("\n".join(mooncake(at) for at in range(2000)).encode(), mtime=0)
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
    path = tmp_path / "trace.gz"
    path.write_bytes({"cut": whole[:middle], "flipped": flipped, "appended": whole + b"x"}[damage])
    complaint(path, "mooncake")


def test_an_unknown_format_is_refused_with_the_known_ones(write: Write) -> None:
    known = "choose one of mooncake, bailian, qwen, azure, burstgpt"
    with pytest.raises(ConfigError, match=known):
        read_trace(write(mooncake()), "lmcache")


def test_a_limit_below_one_is_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match="trace limit 0 must be at least 1"):
        read_trace(write(mooncake()), "mooncake", limit=0)


def test_a_trace_error_crosses_a_process_pool(tmp_path: Path) -> None:
    error = TraceError(tmp_path, 3, "reason")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# ---- the public conversation trace -------------------------------------------------------------


@pytest.fixture(scope="module")
def conversation() -> Workload:
    """The conversation trace of the Mooncake FAST'25 paper, which the project does not contain."""
    beside = Path(refimpl.__file__).parents[2] / "shared" / "traces"
    path = Path(os.environ.get("HICACHE_TRACES", beside)) / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there; set HICACHE_TRACES to the folder of the public traces")
    return read_trace(path, "mooncake")


def test_the_conversation_trace_has_its_published_size(conversation: Workload) -> None:
    assert len(conversation.requests) == 12_031
    assert sum(request.prompt.length for request in conversation.requests) == 144_793_823


def test_the_conversation_trace_has_the_known_hits_without_a_limit(conversation: Workload) -> None:
    assert hit_tokens(conversation, 512) == 54_063_104


def test_the_digest_of_the_conversation_trace_is_pinned(conversation: Workload) -> None:
    pinned = "b3c025b51a0ca7328db9c51da5a6c6bdbb6cf51bad46a9b1d5205117ea4adf2a"
    assert workload_digest(conversation) == pinned


def test_a_trace_over_centuries_is_refused(write: Write) -> None:
    path = write(AZURE_HEADER, "0001-01-01 00:00:00,5,4", "2400-12-31 23:59:59,5,5")
    with pytest.raises(TraceError, match="spans more than 146 years"):
        read_trace(path, "azure")
