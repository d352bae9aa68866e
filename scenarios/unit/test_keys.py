"""Page keys: upstream's vectors, namespaces that can't collide, names of traces and outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import refimpl
from refimpl.keys import (
    BlockPrompt,
    TokenPrompt,
    block_event_hash,
    namespace_seed,
    pack_tokens,
    page_keys,
)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
WIDE_TOKENS = st.lists(st.integers(0, 2**64 - 1), max_size=40)
PLAIN = ("34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f",
         "c57b445f90651b9a650e516ab2238c965b21af35608a31c303e6d9e407f2915c")  # fmt: skip
TRICKY = (None, "", "a", "ab", "b", "c", "a\x00", "\x01a", "sglang-cache-namespace-v1", "a|b")
FIVE_SEQUENCES = """
from refimpl.keys import BlockPrompt, namespace_seed, page_keys
chains = [
    page_keys([1, 2, 3, 4], 2),
    page_keys(range(100), 16, namespace_seed("tenant", "salt", "adapter")),
    page_keys([1, 2**32], 2),
    page_keys([5] * 64, 64, namespace_seed(None, "salt")),
    BlockPrompt(32, (7, 9), 16).page_keys(16, namespace_seed("tenant")),
]
print([key.hex() for chain in chains for key in chain])
"""


def hexes(keys: list[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def test_the_keys_of_two_pages_are_upstreams() -> None:
    assert hexes(page_keys([1, 2, 3, 4], 2)) == list(PLAIN)


def test_a_page_as_long_as_the_list_has_the_key_upstream_gives_the_whole_list() -> None:
    whole = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
    assert hexes(page_keys([1, 2, 3, 4], 4)) == [whole]


@pytest.mark.parametrize(
    ("extra_key", "cache_salt", "seed", "page"),
    [
        (
            "lora-a",
            None,
            "407c773a7c02b33bd4a62af6bf5fc77997c2c8067811ecf2b39e3839c3f4284b",
            "ad023babe5121ed61b30e57d93dc9d29cb19b361c098794f361e7a94bf561d88",
        ),
        (
            None,
            "salt",
            "43601f36bb365a5bdb202f3b4398e5edcdc529750311c8aa2028ce19293f8d6e",
            "bf41a8174e2b602219de63e4b6647d985b3d635b61693c5c8201e6b5e63b9ff2",
        ),
    ],
)
def test_a_namespace_has_upstreams_seed_and_first_page(
    extra_key: str | None, cache_salt: str | None, seed: str, page: str
) -> None:
    assert namespace_seed(extra_key, cache_salt).hex() == seed
    assert hexes(page_keys([1, 2], 2, namespace_seed(extra_key, cache_salt))) == [page]


def test_a_page_with_a_token_above_32_bits_is_hashed_in_8_byte_words() -> None:
    wide = "66af2f218931e670270f1b4ea79f49befb670188f60c94856ed7a1743298f181"
    assert hexes(page_keys([1, 2**32], 2)) == [wide]


def test_a_wide_page_leaves_the_narrow_pages_around_it_narrow() -> None:
    keys = page_keys([1, 2, 1, 2**32, 3, 4], 2)
    assert keys[0].hex() == PLAIN[0]
    assert keys[1] == page_keys([1, 2**32], 2, keys[0])[0]
    assert keys[2] == page_keys([3, 4], 2, keys[1])[0]


def test_the_event_hash_of_the_first_page_is_upstreams() -> None:
    assert block_event_hash(page_keys([1, 2], 2)[0]) == 3817746824117602890


def test_an_event_hash_may_be_negative() -> None:
    assert block_event_hash(b"\xff" * 32) == -1


def test_a_partial_page_has_no_key() -> None:
    assert page_keys([1], 2) == []
    assert hexes(page_keys([1, 2, 3], 2)) == [PLAIN[0]]
    assert page_keys([], 2) == []


@pytest.mark.parametrize("token", [-1, 2**64])
def test_a_token_outside_64_unsigned_bits_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        page_keys([token, 2**32], 2)


@given(WIDE_TOKENS, st.integers(1, 8))
def test_keys_do_not_depend_on_how_the_tokens_are_packed(tokens: list[int], page: int) -> None:
    assert page_keys(tokens, page) == page_keys(array("Q", tokens), page)


@given(TOKENS, st.integers(1, 8))
def test_a_narrow_array_and_a_list_have_the_same_keys(tokens: list[int], page: int) -> None:
    assert page_keys(tokens, page) == page_keys(pack_tokens(tokens), page)


@given(TOKENS, st.integers(1, 8), st.integers(0, 5))
def test_a_chain_can_be_continued_from_any_page(tokens: list[int], page: int, cut: int) -> None:
    whole = page_keys(tokens, page)
    cut = min(cut, len(whole))
    prior = whole[cut - 1] if cut else b""
    assert page_keys(tokens[cut * page :], page, prior) == whole[cut:]


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_two_sequences_share_a_key_exactly_where_they_share_all_before(
    left: list[int], right: list[int], page: int
) -> None:
    for index, (a, b) in enumerate(
        zip(page_keys(left, page), page_keys(right, page), strict=False)
    ):
        end = (index + 1) * page
        assert (a == b) == (left[:end] == right[:end])


def test_no_two_of_200_namespaces_share_a_seed() -> None:
    combinations = list(product(TRICKY, (None, "a", "ab", "b", "c"), TRICKY[:4]))
    assert len(combinations) == 200
    seeds = [namespace_seed(extra, salt, lora) for extra, salt, lora in combinations]
    assert len(dict.fromkeys(seeds)) == 200
    assert seeds == [namespace_seed(extra, salt, lora) for extra, salt, lora in combinations]


def test_no_two_of_200_namespaces_share_a_page() -> None:
    pages = [
        page_keys([1, 2], 2, namespace_seed(extra, salt, lora))[0]
        for extra, salt, lora in product(TRICKY, (None, "a", "ab", "b", "c"), TRICKY[:4])
    ]
    assert len(dict.fromkeys(pages)) == 200


def test_an_empty_salt_is_no_salt() -> None:
    assert namespace_seed(None, "") == b""
    assert namespace_seed("tenant", "") == namespace_seed("tenant", None)


def test_an_extra_key_that_spells_an_adapter_does_not_reach_its_pages() -> None:
    assert namespace_seed("tenantadapter") != namespace_seed("tenant", None, "adapter")


def test_fresh_interpreters_with_different_hash_seeds_give_the_same_keys() -> None:
    root = str(Path(refimpl.__file__).parents[1])
    outputs = [
        subprocess.run(
            [sys.executable, "-c", FIVE_SEQUENCES],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    ]
    assert outputs[0].startswith(f"['{PLAIN[0]}', '{PLAIN[1]}'")
    assert outputs == outputs[:1] * 3


# ---- outputs of prompts with tokens ------------------------------------------------------------


def output_chain(prompt: TokenPrompt, pages: int, produced: list[int]) -> list[bytes]:
    """Keys of all ``pages`` pages, of size 4, of prompt and output."""
    keys = prompt.page_keys(4, b"")
    while len(keys) < pages:
        prior = keys[-1] if keys else b""
        keys.append(prompt.output_key(len(keys), 4, prior, 1, array("I", produced)))
    return keys


@given(st.lists(st.integers(0, 9), max_size=9), st.lists(st.integers(0, 9), max_size=9))
def test_the_next_turn_finds_the_scripted_output_under_its_own_keys(
    said: list[int], answer: list[int]
) -> None:
    prompt = TokenPrompt(array("I", said), array("I", answer))
    pages = (len(said) + len(answer)) // 4
    assert output_chain(prompt, pages, []) == page_keys(said + answer, 4)


def test_without_a_script_the_produced_tokens_name_the_output() -> None:
    prompt = TokenPrompt(array("I", [1, 2, 3]))
    assert output_chain(prompt, 2, [4, 5, 6, 7, 8]) == page_keys(range(1, 9), 4)


def test_an_output_page_of_unknown_tokens_has_a_name_no_other_request_has() -> None:
    prompt = TokenPrompt(array("I", [1, 2, 3]))
    names = [prompt.output_key(0, 4, b"", rid, array("I")) for rid in (1, 2)]
    assert names[0] != names[1]
    assert page_keys([1, 2, 3, 0], 4)[0] not in names


# ---- prompts that name blocks ------------------------------------------------------------------


def test_block_prompts_share_pages_up_to_the_first_different_block() -> None:
    left = BlockPrompt(48, (1, 2, 3), 16).page_keys(16, b"")
    right = BlockPrompt(48, (1, 2, 4), 16).page_keys(16, b"")
    assert left[:2] == right[:2]
    assert left[2] != right[2]


@pytest.mark.parametrize(("page", "shared"), [(4, 8), (16, 2), (32, 1), (64, 0)])
def test_a_page_is_named_by_the_block_of_its_last_token(page: int, shared: int) -> None:
    left = BlockPrompt(64, (1, 2, 3, 4), 16).page_keys(page, b"")
    right = BlockPrompt(64, (1, 2, 5, 6), 16).page_keys(page, b"")
    assert [a == b for a, b in zip(left, right, strict=True)] == [
        index < shared for index in range(64 // page)
    ]


def test_block_names_of_two_page_sizes_never_meet() -> None:
    prompt = BlockPrompt(64, (1, 2, 3, 4), 16)
    names = [name for page in (8, 16, 32) for name in prompt.page_keys(page, b"")]
    assert len(dict.fromkeys(names)) == 8 + 4 + 2


def test_a_namespace_separates_block_names() -> None:
    prompt = BlockPrompt(16, (1,), 16)
    assert prompt.page_keys(16, namespace_seed("a")) != prompt.page_keys(16, b"")


def test_ids_past_the_prompt_name_the_output() -> None:
    parent, child = BlockPrompt(16, (1, 2), 16), BlockPrompt(32, (1, 2), 16)
    assert parent.output_is_linked
    assert parent.output_key(1, 16, b"", 9, array("I")) == child.page_keys(16, b"")[1]


def test_a_linked_output_page_has_the_name_of_the_next_turn_in_its_namespace_alone() -> None:
    parent, child = BlockPrompt(16, (1, 2), 16), BlockPrompt(32, (1, 2), 16)
    names = []
    for seed in (b"", namespace_seed("a"), namespace_seed("b")):
        names.append(parent.output_key(1, 16, b"", 9, array("I"), seed))
        assert names[-1] == child.page_keys(16, seed)[1]
    assert len(set(names)) == 3


def test_an_output_that_no_turn_repeats_has_a_name_of_its_own() -> None:
    prompt = BlockPrompt(16, (1,), 16)
    names = [prompt.output_key(1, 16, b"", rid, array("I")) for rid in (1, 2)]
    assert not prompt.output_is_linked
    assert names[0] != names[1]
