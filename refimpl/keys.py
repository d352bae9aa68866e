"""The one name of a page: chained SHA-256 over page-aligned tokens, byte for byte SGLang's.

A key contains its whole prefix, so two sequences that share the key of page i share everything
before it. Tree, L3, KV events, router and PD all use this name and no other.
Must not know: where a page lies, who asks, when. Called by: core, workload, router.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, TypeAlias

PageKey: TypeAlias = bytes  # 32 bytes

_U32_MAX: Final = (1 << 32) - 1
_U64_MAX: Final = (1 << 64) - 1
_WIDE_TAG: Final = b"\xff"  # marks a page whose words are 8 bytes wide (spec 2.11)
_SEED_TAG: Final = b"sglang-cache-namespace-v1"  # spec 2.11
_NAME = struct.Struct("<QQQQ").pack
_BLOCK, _GENERATED = 0, 1  # the two kinds of names for pages whose tokens are not known


def namespace_seed(
    extra_key: str | None = None, cache_salt: str | None = None, lora_id: str | None = None
) -> bytes:
    """32 bytes that open the key chain of a namespace; empty for the plain one.

    Fields are length-prefixed, so no two combinations of strings collide. An empty ``cache_salt``
    is no salt (spec 2.1). Upstream folds the LoRA id into ``extra_key`` by concatenation, which
    lets a crafted key alias an adapter; here it is a field of its own, absent from the hash when
    no adapter is used so that all other seeds equal upstream's.
    """
    if extra_key is None and not cache_salt and lora_id is None:
        return b""
    data = _SEED_TAG + _field(extra_key) + _field(cache_salt or None)
    if lora_id is not None:
        data += _field(lora_id)
    return hashlib.sha256(data).digest()


def _field(value: str | None) -> bytes:
    if value is None:
        return b"\x00"
    raw = value.encode("utf-8", "surrogatepass")
    return b"\x01" + len(raw).to_bytes(8, "little") + raw


def page_keys(tokens: Sequence[int], page_size: int, prior: bytes = b"") -> list[PageKey]:
    """Keys of the full pages of ``tokens``, chained onto ``prior``.

    ``prior`` is the key of the page before, or the namespace seed, or empty. Token ids are
    unsigned; a page holding one above 2**32 - 1 is hashed with 8-byte words behind a tag byte.
    Pass an ``array('I')``: packing a list costs as much as hashing it. Raises OverflowError for an
    id outside 0 .. 2**64 - 1.
    """
    if not (isinstance(tokens, array) and tokens.typecode == "I"):
        tokens = pack_tokens(tokens)
        if tokens.typecode != "I":
            return _wide_page_keys(tokens, page_size, prior)
    data = tokens.tobytes()
    step = page_size * 4
    sha256 = hashlib.sha256
    keys = []
    for start in range(0, len(data) - step + 1, step):
        prior = sha256(prior + data[start : start + step]).digest()
        keys.append(prior)
    return keys


def pack_tokens(tokens: Sequence[int]) -> array[int]:
    """Tokens as ``array('I')``, or ``array('Q')`` when one of them needs more than 32 bits."""
    if isinstance(tokens, array) and tokens.typecode in "IQ":
        return tokens
    wide = any(token > _U32_MAX for token in tokens)
    return array("Q" if wide else "I", tokens)


def _wide_page_keys(tokens: array[int], page_size: int, prior: bytes) -> list[PageKey]:
    keys = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = tokens[start : start + page_size]
        wide = any(token > _U32_MAX for token in page)
        payload = _WIDE_TAG + page.tobytes() if wide else array("I", page).tobytes()
        prior = hashlib.sha256(prior + payload).digest()
        keys.append(prior)
    return keys


def block_event_hash(key: PageKey) -> int:
    """Block hash of KV events: the first 8 bytes of the key, big-endian, signed (spec 2.12)."""
    return int.from_bytes(key[:8], "big", signed=True)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt whose tokens are known. ``script`` is the output it will produce, when that is known too."""

    tokens: array[int]
    script: array[int] | None = None

    @property
    def length(self) -> int:
        """Prompt length in tokens."""
        return len(self.tokens)

    def page_keys(self, page_size: int, seed: bytes) -> list[PageKey]:
        """Keys of the full pages of the prompt alone."""
        return page_keys(self.tokens, page_size, seed)

    def output_key(
        self,
        index: int,
        page_size: int,
        prior: bytes,
        rid: int,
        produced: array[int],
        seed: bytes = b"",
    ) -> PageKey:
        """Key of page ``index``, which ends in the output.

        The output is the script, else what was ``produced`` so far; where neither reaches the end
        of the page its tokens are unknown and it gets a name nothing else can have.
        """
        del seed  # the namespace is in ``prior``
        page = self.page_tokens(index, page_size, produced)
        if page is None:
            return _generated_name(rid, index, page_size)
        return page_keys(page, page_size, prior)[0]

    def page_tokens(self, index: int, page_size: int, produced: array[int]) -> array[int] | None:
        """Tokens of page ``index`` of prompt and output; None where the output is not known so far."""
        start, end = index * page_size, (index + 1) * page_size
        output = self.script if self.script is not None else produced
        cut = len(self.tokens)
        if end > cut + len(output):
            return None
        return self.tokens[start : min(cut, end)] + output[max(start - cut, 0) : max(end - cut, 0)]


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A prompt of a trace that carries block hashes instead of tokens.

    ``block_ids`` are prefix-chained: equal ids mean equal prefixes up to and including the block.
    Page i is named by the block that holds its last token, i, and the page size; what two prompts
    share inside one block can't be seen, so with pages smaller than a block hit counts are a
    lower bound. Ids beyond ``length`` name the output, where the trace links turns; output pages
    without one get names of their own and never hit.
    """

    length: int
    block_ids: tuple[int, ...]
    block_size: int

    def page_keys(self, page_size: int, seed: bytes) -> list[PageKey]:
        """Keys of the full pages of the prompt alone."""
        ids, count = self.block_ids, self.length // page_size
        if page_size != self.block_size:
            block = self.block_size
            ids = tuple(ids[((i + 1) * page_size - 1) // block] for i in range(count))
        names = list(map(_NAME, ids, range(count), repeat(page_size), repeat(_BLOCK)))
        return [_seeded(seed, name) for name in names] if seed else names

    def output_key(
        self,
        index: int,
        page_size: int,
        prior: bytes,
        rid: int,
        produced: array[int],
        seed: bytes = b"",
    ) -> PageKey:
        """Key of page ``index``, which ends in the output."""
        del prior, produced  # block names are not chained here: the trace's ids already are
        block = ((index + 1) * page_size - 1) // self.block_size
        if block < len(self.block_ids) and self.output_is_linked:
            name = _NAME(self.block_ids[block], index, page_size, _BLOCK)
            return _seeded(seed, name) if seed else name
        return _generated_name(rid, index, page_size)

    def page_tokens(self, index: int, page_size: int, produced: array[int]) -> array[int] | None:
        """None: a trace of blocks has no tokens."""
        del index, page_size, produced
        return None

    @property
    def output_is_linked(self) -> bool:
        """True when the ids reach past the prompt's own blocks."""
        return len(self.block_ids) > -(-self.length // self.block_size)


Prompt: TypeAlias = TokenPrompt | BlockPrompt


def _generated_name(rid: int, index: int, page_size: int) -> PageKey:
    return _NAME(rid & _U64_MAX, index, page_size, _GENERATED)


def _seeded(seed: bytes, name: bytes) -> PageKey:
    return hashlib.sha256(seed + name).digest()
