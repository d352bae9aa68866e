"""Scenario strings: what each family sends, what a seed fixes, and what is refused."""

from __future__ import annotations

from array import array
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.config import ConfigError
from refimpl.keys import TokenPrompt, page_keys
from refimpl.units import NS_PER_MS, NS_PER_S
from refimpl.workload.digest import workload_digest
from refimpl.workload.draws import Draws, Purpose
from refimpl.workload.family import Family
from refimpl.workload.request import RequestSpec, Workload
from refimpl.workload.scenario import FAMILIES, parse_scenario, scenario_help

SMALL = {
    "multi_turn": "clients=3,rounds=4,request_length=10,system_length=6,systems=2,output_length=3",
    "shared_prefix": "groups=3,prompts_per_group=4,system_length=10,question_length=3",
    "long_document": "documents=3,document_length=20,questions=4,question_length=3",
    "rag": "requests=12,documents=6,chunks=3,chunk_length=8,system_length=4,question_length=3",
    "agent": "sessions=3,turns=4,tools_length=20,task_length=5,tool_output_min=2,tool_output_max=7",
    "all_unique": "requests=10,request_length=12",
    "all_equal": "requests=10,request_length=12",
}
ALL = tuple(SMALL)
PINNED = {
    "multi_turn": "fc16371ce28aae46c50de8ac212de80029b2c2144c824b9d8fe7719c099a6aae",
    "rag": "2f06c2b3bce162fa0b202296c1e5b95313f3a94850e48b9ff2462be022a17448",
}


def small(family: str, extra: str = "", seed: int = 1, page_size: int = 4) -> Workload:
    parameters = ",".join(filter(None, (SMALL[family], extra)))
    return parse_scenario(f"{family}:{parameters}", seed, page_size)


def tokens(request: RequestSpec) -> array[int]:
    assert isinstance(request.prompt, TokenPrompt)
    return request.prompt.tokens


def script(request: RequestSpec) -> array[int]:
    assert isinstance(request.prompt, TokenPrompt)
    assert request.prompt.script is not None
    return request.prompt.script


def arrivals(workload: Workload) -> list[int]:
    return [request.arrival_ns for request in workload.requests]


def refused(text: str, page_size: int = 64) -> str:
    """The one line with which ``text`` is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_scenario(text, 1, page_size)
    message = str(caught.value)
    assert message == message.strip()
    assert "\n" not in message
    return message


# ---- every family ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
def test_a_family_works_with_its_name_alone(family: str) -> None:
    workload = parse_scenario(family, 1)
    assert workload.name == family
    assert workload.requests
    assert workload.block_size is None


@pytest.mark.parametrize("family", ALL)
def test_rids_count_from_one_and_arrivals_of_a_turn_ascend(family: str) -> None:
    requests = small(family).requests
    assert [request.rid for request in requests] == list(range(1, len(requests) + 1))
    opening = [request.arrival_ns for request in requests if not request.after]
    assert opening == sorted(opening)


@pytest.mark.parametrize("family", ALL)
def test_every_output_is_scripted_to_its_length(family: str) -> None:
    for request in small(family, "" if family == "multi_turn" else "output_length=3").requests:
        assert len(script(request)) == request.output_tokens == 3


@pytest.mark.parametrize("family", ALL)
def test_the_same_seed_gives_the_same_workload_and_another_seed_another(family: str) -> None:
    assert small(family) == small(family)
    assert workload_digest(small(family)) != workload_digest(small(family, seed=2))


@pytest.mark.parametrize("family", ALL)
def test_all_tokens_are_below_the_vocabulary(family: str) -> None:
    for request in small(family, "vocab=50").requests:
        assert max(tokens(request)) < 50
        assert max(script(request)) < 50


@pytest.mark.parametrize("family", ALL)
def test_tokens_are_32_bit_arrays(family: str) -> None:
    assert all(tokens(request).typecode == "I" for request in small(family).requests)


@pytest.mark.parametrize("family", ALL)
def test_the_announced_size_is_what_is_sent(family: str) -> None:
    parameters = dict(part.split("=") for part in SMALL[family].split(","))
    if family == "agent":
        parameters["tool_output_min"] = parameters["tool_output_max"]
    values = {name: int(value) for name, value in parameters.items()}
    spec = FAMILIES[family](**values)
    requests = spec.build(Draws(1, spec.vocab), 4)
    sent = sum(len(tokens(request)) + len(script(request)) for request in requests)
    assert (len(requests), sent) == (spec.request_count(), spec.token_count())


@pytest.mark.parametrize("family", ALL)
def test_the_length_of_the_output_does_not_move_arrivals_or_questions(family: str) -> None:
    short = small(family, seed=3)
    text = SMALL[family].replace("output_length=3", "output_length=9")
    extra = "" if "output_length" in text else ",output_length=9"
    long = parse_scenario(f"{family}:{text}{extra}", 3, 4)
    assert arrivals(long) == arrivals(short)
    opening = [index for index, request in enumerate(short.requests) if not request.after]
    assert [tokens(long.requests[i]) for i in opening] == [
        tokens(short.requests[i]) for i in opening
    ]


@pytest.mark.parametrize("family", [name for name in ALL if name != "all_equal"])
def test_the_rate_zero_starts_all_at_once(family: str) -> None:
    assert set(arrivals(small(family, "rate=0"))) == {0}


@pytest.mark.parametrize("family", ALL)
def test_max_parallel_limits_the_workload_and_zero_is_no_limit(family: str) -> None:
    assert small(family, "max_parallel=4").parallel_max == 4
    assert small(family, "max_parallel=0").parallel_max is None


# ---- arrivals ----------------------------------------------------------------------------------


def test_a_thousand_poisson_arrivals_take_about_a_thousand_mean_gaps() -> None:
    workload = parse_scenario("all_unique:requests=1000,request_length=4,rate=2.5", 1)
    assert abs(arrivals(workload)[-1] - 400 * NS_PER_S) < 40 * NS_PER_S


def test_doubling_the_rate_halves_every_arrival_time() -> None:
    slow, fast = (
        arrivals(parse_scenario(f"all_unique:requests=50,request_length=4,rate={rate}", 1))
        for rate in (2, 4)
    )
    assert all(abs(late - 2 * early) <= 100 for late, early in zip(slow, fast, strict=True))


def test_one_more_client_leaves_the_others_as_they_were() -> None:
    few = parse_scenario("multi_turn:clients=3,rounds=1", 1).requests
    more = parse_scenario("multi_turn:clients=4,rounds=1", 1).requests
    assert more[:3] == few


def test_a_longer_question_begins_with_the_shorter_one() -> None:
    draws = Draws(1, 1000)
    longer = draws.tokens(Purpose.QUESTION, 20, 5)
    assert longer[:8] == draws.tokens(Purpose.QUESTION, 8, 5)


@given(st.integers(2, 2**32 - 1), st.integers(0, 50), st.integers())
def test_tokens_drawn_at_once_are_each_word_scaled_to_the_vocabulary(
    vocabulary: int, count: int, seed: int
) -> None:
    full = Draws(seed, 2**32 - 1).tokens(Purpose.OUTPUT, count)
    drawn = Draws(seed, vocabulary).tokens(Purpose.OUTPUT, count)
    assert len(drawn) == count
    for token, word in zip(drawn, full, strict=True):
        # The largest vocabulary loses at most 1 of the 32-bit word that both are scaled from.
        assert token in (word * vocabulary >> 32, (word + 1) * vocabulary >> 32)


# ---- multi_turn --------------------------------------------------------------------------------


def test_a_turn_repeats_the_one_before_with_its_answer_and_adds_a_message() -> None:
    requests = small("multi_turn").requests
    for request in requests[3:]:
        before = requests[request.rid - 1 - 3]
        said = tokens(before) + script(before)
        assert tokens(request)[: len(said)] == said
        assert len(tokens(request)) == len(said) + 10


def test_a_turn_waits_for_the_turn_before_and_the_think_time() -> None:
    requests = small("multi_turn", "think_ms=250").requests
    assert [request.after for request in requests[:3]] == [(), (), ()]
    assert [request.after for request in requests[3:6]] == [(1,), (2,), (3,)]
    assert [request.think_ns for request in requests[2:4]] == [0, 250 * NS_PER_MS]
    assert [(request.session, request.turn) for request in requests[4:7]] == [
        (1, 1),
        (2, 1),
        (0, 2),
    ]


def test_a_round_barrier_makes_a_turn_wait_for_the_whole_round_before() -> None:
    requests = small("multi_turn", "round_barrier=true").requests
    assert [request.after for request in requests[:6]] == [()] * 3 + [(1, 2, 3)] * 3


def test_system_prompts_go_to_the_clients_in_turn() -> None:
    openings = [bytes(tokens(request)[:6]) for request in small("multi_turn").requests[:3]]
    assert openings[0] == openings[2] != openings[1]


def test_eight_system_prompts_under_two_hundred_conversations_can_be_written() -> None:
    workload = parse_scenario(
        "multi_turn:clients=200,systems=8,system_length=1024,rounds=5,request_length=512,"
        "output_length=64,max_parallel=16",
        1,
    )
    openings = [page_keys(tokens(request)[:1024], 1024)[0] for request in workload.requests]
    assert len(workload.requests) == 1000
    assert len(dict.fromkeys(openings)) == 8
    assert len(tokens(workload.requests[-1])) == 1024 + 5 * 512 + 4 * 64


# ---- shared_prefix, long_document --------------------------------------------------------------


@pytest.mark.parametrize(("family", "shared"), [("shared_prefix", 10), ("long_document", 20)])
def test_requests_of_one_group_share_its_text_and_nothing_else(family: str, shared: int) -> None:
    requests = small(family).requests
    texts = {request.session: bytes(tokens(request)[:shared]) for request in requests}
    questions = [bytes(tokens(request)[shared:]) for request in requests]
    assert all(bytes(tokens(request)[:shared]) == texts[request.session] for request in requests)
    assert len(dict.fromkeys(texts.values())) == 3
    assert len(dict.fromkeys(questions)) == 12


@pytest.mark.parametrize("family", ["shared_prefix", "long_document"])
def test_order_tile_is_a_cyclic_scan(family: str) -> None:
    sessions = [request.session for request in small(family, "order=tile").requests]
    assert sessions == [0, 1, 2] * 4


@pytest.mark.parametrize("family", ["shared_prefix", "long_document"])
def test_order_grouped_finishes_one_group_before_the_next(family: str) -> None:
    sessions = [request.session for request in small(family, "order=grouped").requests]
    assert sessions == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("family", ["shared_prefix", "long_document"])
def test_order_random_sends_the_same_prompts_in_another_order(family: str) -> None:
    shuffled = [bytes(tokens(request)) for request in small(family, "order=random").requests]
    tiled = [bytes(tokens(request)) for request in small(family, "order=tile").requests]
    assert shuffled != tiled
    assert sorted(shuffled) == sorted(tiled)


def test_a_turn_of_a_document_counts_how_often_it_was_asked_before() -> None:
    requests = small("long_document").requests
    for document in range(3):
        turns = [request.turn for request in requests if request.session == document]
        assert turns == [0, 1, 2, 3]


# ---- rag ---------------------------------------------------------------------------------------


def chunks_of(request: RequestSpec) -> list[bytes]:
    return [bytes(tokens(request)[start : start + 8]) for start in (4, 12, 20)]


def test_a_prompt_holds_different_chunks_of_the_corpus() -> None:
    requests = small("rag").requests
    corpus = dict.fromkeys(chunk for request in requests for chunk in chunks_of(request))
    assert len(corpus) <= 6
    assert all(len(dict.fromkeys(chunks_of(request))) == 3 for request in requests)


def test_sorting_changes_the_order_of_chunks_and_not_which_they_are() -> None:
    by_rank = [chunks_of(request) for request in small("rag", "sorted=true").requests]
    as_drawn = [chunks_of(request) for request in small("rag", "sorted=false").requests]
    assert by_rank != as_drawn
    assert [sorted(chunks) for chunks in by_rank] == [sorted(chunks) for chunks in as_drawn]


def test_sorted_prompts_agree_on_the_order_of_any_two_chunks() -> None:
    requests = small("rag").requests
    pairs = {tuple(chunks_of(request)[i : i + 2]) for request in requests for i in (0, 1)}
    assert not any((right, left) in pairs for left, right in pairs)


def test_a_prompt_may_take_the_whole_corpus() -> None:
    text = "rag:requests=2,documents=200,chunks=200,chunk_length=1,question_length=1"
    requests = parse_scenario(text, 1).requests
    assert tokens(requests[0])[:456] == tokens(requests[1])[:456]


def test_popular_chunks_are_in_more_prompts() -> None:
    requests = parse_scenario("rag:requests=300,chunks=1,documents=50,system_length=0", 1).requests
    seen: dict[bytes, int] = {}
    for request in requests:
        chunk = bytes(tokens(request)[:512])
        seen[chunk] = seen.get(chunk, 0) + 1
    assert max(seen.values()) > 5 * sorted(seen.values())[len(seen) // 2]


# ---- agent -------------------------------------------------------------------------------------


def test_all_agents_share_the_tool_description_and_nothing_of_the_task() -> None:
    opening = small("agent").requests[:3]
    assert len({bytes(tokens(request)[:20]) for request in opening}) == 1
    assert len({bytes(tokens(request)[20:]) for request in opening}) == 3


def test_a_tool_output_is_between_its_bounds_and_follows_the_answer() -> None:
    requests = small("agent", "output_length=3").requests
    added = []
    for request in requests[3:]:
        before = requests[request.rid - 1 - 3]
        said = tokens(before) + script(before)
        assert tokens(request)[: len(said)] == said
        added.append(len(tokens(request)) - len(said))
    assert all(2 <= length <= 7 for length in added)
    assert len(set(added)) > 1


# ---- extremes ----------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
def test_no_two_prompts_of_all_unique_share_a_page(count: int, page: int, seed: int) -> None:
    vocabulary = 2 if page >= 6 else 64
    text = f"all_unique:requests={count},request_length=24,vocab={vocabulary},output_length=1"
    keys = [
        key
        for request in parse_scenario(text, seed, page).requests
        for key in request.prompt.page_keys(page, b"")
    ]
    assert len(keys) == count * (24 // page)
    assert len(dict.fromkeys(keys)) == len(keys)


def test_all_unique_refuses_a_vocabulary_too_small_to_differ_in_one_page() -> None:
    message = refused("all_unique:requests=5,vocab=2", page_size=2)
    assert "vocab=2" in message
    assert "raise vocab" in message


def test_all_equal_sends_one_prompt_at_a_fixed_gap() -> None:
    workload = small("all_equal", "gap_ms=20")
    assert arrivals(workload) == [index * 20 * NS_PER_MS for index in range(10)]
    assert all(request.prompt == workload.requests[0].prompt for request in workload.requests)


# ---- what is refused ---------------------------------------------------------------------------


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    assert refused("chat:clients=1") == (
        "scenario 'chat' is unknown; choose one of multi_turn, shared_prefix, long_document, rag,"
        " agent, all_unique, all_equal"
    )


def test_an_unknown_parameter_is_refused_with_the_known_ones() -> None:
    assert refused("all_equal:clients=1") == (
        "all_equal: parameter 'clients' is unknown; choose from output_length, max_parallel, vocab,"
        " requests, request_length, gap_ms"
    )


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e3", "x", "1_0", "\u0663", "9" * 5000])
def test_what_is_no_whole_positive_number_is_refused(value: str) -> None:
    message = refused(f"multi_turn:clients={value}")
    assert message.startswith("multi_turn: clients='")
    assert message.endswith("is not a whole number from 1 to 2147483648")
    assert len(message) < 140


@pytest.mark.parametrize("value", ["-1", "fast", "nan", "0.0000001", "1e12", "--1"])
def test_what_is_no_usable_rate_is_refused(value: str) -> None:
    message = refused(f"multi_turn:rate={value}")
    assert message.startswith(f"multi_turn: rate='{value}' is not 0 or a decimal number")


@pytest.mark.parametrize("value", ["1", "yes", "True"])
def test_a_flag_is_true_or_false(value: str) -> None:
    expected = f"multi_turn: round_barrier='{value}' is neither true nor false"
    assert refused(f"multi_turn:round_barrier={value}") == expected


def test_an_unknown_order_is_refused_with_the_known_ones() -> None:
    expected = "long_document: order='up' is unknown; choose one of random, tile, grouped"
    assert refused("long_document:order=up") == expected


@pytest.mark.parametrize("part", ["clients", "clients=", "=3", "clients=3,,rounds=1", "clients=3,"])
def test_a_parameter_is_written_with_its_value(part: str) -> None:
    assert "must be written PARAMETER=VALUE" in refused(f"multi_turn:{part}")


def test_a_parameter_given_twice_is_refused() -> None:
    assert "'clients' is given twice" in refused("multi_turn:clients=1,clients=2")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("multi_turn:clients=10001,rounds=1000,request_length=1", "requests"),
        ("multi_turn:clients=2147483648,rounds=2147483648", "requests"),
        ("all_equal:requests=10000001,request_length=1", "requests"),
        ("all_unique:requests=2,request_length=2147483648", "tokens"),
        ("multi_turn:clients=1,rounds=100000", "tokens"),
        ("long_document:documents=200000", "tokens"),
    ],
)
def test_a_scenario_that_would_not_fit_is_refused_before_it_is_drawn(text: str, what: str) -> None:
    message = refused(text)
    assert f" {what} are more than " in message
    assert "lower one of " in message


def test_more_chunks_than_documents_are_refused() -> None:
    assert "chunks=5 is above documents=4" in refused("rag:documents=4")


def test_tool_outputs_need_their_bounds_in_order() -> None:
    message = refused("agent:tool_output_min=9,tool_output_max=8")
    assert "tool_output_min=9 is above tool_output_max=8" in message


def test_an_error_quotes_a_line_break_instead_of_breaking() -> None:
    assert "'a\\nb'" in refused("multi_turn:a\nb=1")


@given(st.text(max_size=30))
def test_any_text_is_a_workload_or_one_line_of_complaint(text: str) -> None:
    lines = 1
    try:
        parse_scenario("all_equal:requests=2," + text, 1)
    except ConfigError as error:
        lines = len(str(error).splitlines())
    assert lines == 1


# ---- help and digest ---------------------------------------------------------------------------


def test_the_help_names_every_family_and_every_parameter_with_its_default() -> None:
    text = scenario_help()
    for name, cls in FAMILIES.items():
        section = text.split(f"\n{name}\n")[1].split("\n\n")[0]
        for entry in fields(cls):
            assert f"    {entry.name}=" in section
            assert entry.metadata["meaning"] in section


@pytest.mark.parametrize("family", ALL)
def test_the_defaults_the_help_shows_can_be_written_out(family: str) -> None:
    section = scenario_help().split(f"\n{family}\n")[1].split("\n\n")[0]
    written = ",".join(line.split()[0] for line in section.splitlines()[1:])
    spelled, plain = parse_scenario(f"{family}:{written}", 1), parse_scenario(family, 1)
    assert workload_digest(spelled) == workload_digest(plain)


def test_every_family_inherits_the_common_parameters() -> None:
    common = {entry.name for entry in fields(Family)}
    assert common == {"output_length", "max_parallel", "vocab"}


def test_spaces_do_not_change_the_workload_or_its_name() -> None:
    spaced = parse_scenario(" all_equal: requests = 2 ,\n gap_ms=5 ", 1)
    assert spaced == parse_scenario("all_equal:requests=2,gap_ms=5", 1)


def test_the_digest_does_not_depend_on_the_name() -> None:
    workload = small("agent")
    assert workload_digest(workload) == workload_digest(replace(workload, name="moved"))


def test_the_digest_changes_with_every_field_of_a_request() -> None:
    workload = small("all_equal")
    first = workload.requests[0]
    changed = [
        replace(first, rid=99),
        replace(first, prompt=TokenPrompt(tokens(first))),
        replace(first, prompt=TokenPrompt(tokens(first), array("I", [1]))),
        replace(first, prompt=TokenPrompt(array("Q", tokens(first)), script(first))),
        replace(first, output_tokens=1),
        replace(first, arrival_ns=1),
        replace(first, after=(2,)),
        replace(first, think_ns=1),
        replace(first, session=9),
        replace(first, turn=1),
        replace(first, extra_key="a"),
        replace(first, cache_salt="a"),
        replace(first, lora_id="a"),
        replace(first, priority=1),
    ]
    assert len(changed) > len(fields(RequestSpec))
    digests = [
        workload_digest(replace(workload, requests=[request, *workload.requests[1:]]))
        for request in [first, *changed]
    ]
    assert len(dict.fromkeys(digests)) == len(digests)


def test_the_digest_changes_with_the_limits() -> None:
    workload = small("all_equal")
    others = [replace(workload, parallel_max=1), replace(workload, block_size=16)]
    assert len({workload_digest(each) for each in [workload, *others]}) == 3


def test_a_barrier_is_part_of_the_digest() -> None:
    assert workload_digest(small("multi_turn")) != workload_digest(
        small("multi_turn", "round_barrier=true")
    )


def test_the_digest_of_a_known_workload_is_pinned() -> None:
    assert workload_digest(small("multi_turn")) == PINNED["multi_turn"]
    assert workload_digest(small("rag")) == PINNED["rag"]
