"""What a page is called outside: upstream's names where asked for, and nobody else's otherwise."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest

from refimpl.config import ConfigError
from refimpl.keys import page_keys
from refimpl.storage.names import Identity, Namespace, namespace_of

KEY = page_keys([1, 2, 3, 4], 2)[0]
HASH = "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f"  # spec 2.11
GQA = Identity(
    model="org/Model",
    layout="page_first",
    page_size=64,
    layers=28,
    kv_heads=8,
    head_dim=128,
    tp_rank=1,
    tp_size=4,
)
MLA = msgspec.structs.replace(GQA, kv_heads=1, head_dim=576, is_mla=True)


@pytest.mark.parametrize(
    ("backend", "identity", "tag", "name"),
    [
        ("file", GQA, "", f"{HASH}_org-Model_1_4"),
        ("file", MLA, "", f"{HASH}_org-Model"),
        ("nixl", GQA, "", f"{HASH}_org-Model_1_4"),
        ("nixl", MLA, "", f"{HASH}_org-Model"),
        ("mooncake", GQA, "", f"{HASH}_1"),
        ("mooncake", MLA, "", f"{HASH}_"),
        ("mooncake", GQA, "blue", f"blue_org-Model_{HASH}_1"),
        ("dynamic", GQA, "", HASH),
        ("aibrix", GQA, "", HASH),
    ],
)
def test_names_are_upstreams_where_asked_for(
    backend: str, identity: Identity, tag: str, name: str
) -> None:
    assert namespace_of(backend, identity, compat="sglang", tag=tag).name(KEY) == name


CHANGES = [
    {},
    {"model": "org/Other"},
    {"weights": "2"},
    {"dtype": "float16"},
    {"layout": "page_head"},
    {"page_size": 32},
    {"layers": 29},
    {"kv_heads": 4},
    {"head_dim": 64},
    {"is_mla": True},
    {"tp_rank": 0},
    {"tp_size": 8},
]


@pytest.mark.parametrize("backend", ["memory", "file", "mooncake", "nixl", "aibrix", "dynamic"])
def test_no_two_identities_share_a_name(backend: str) -> None:
    spaces = [namespace_of(backend, msgspec.structs.replace(GQA, **change)) for change in CHANGES]
    for one, other in combinations(spaces, 2):
        assert one.name(KEY) != other.name(KEY)
        assert not one.owns(other.name(KEY))
    assert all(space.owns(space.name(KEY)) for space in spaces)


def test_ranks_of_a_latent_cache_share_their_names() -> None:
    other = msgspec.structs.replace(MLA, tp_rank=3)
    assert namespace_of("file", MLA).name(KEY) == namespace_of("file", other).name(KEY)


def test_a_namespace_does_not_own_what_only_looks_like_its_own() -> None:
    space = Namespace("a_", "_b")
    assert space.owns(f"a_{HASH}_b")
    for stranger in (HASH, f"a_{HASH}", f"a_{HASH[:-1]}g_b", f"a_{HASH}0_b", "a__b", ""):
        assert not space.owns(stranger)


def test_an_unknown_compat_is_refused() -> None:
    with pytest.raises(ConfigError, match="compat must be sglang"):
        namespace_of("file", GQA, compat="vllm")
