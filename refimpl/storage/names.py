"""What a page is called in an external store, so that only whoever can use its bytes finds them.

A page key says which tokens; the identity says whose numbers these are: model and its weights, data
type, layout, page size, heads. Under ``compat: sglang`` names are upstream's to the byte (spec 5.3-5.4),
which tell apart what upstream tells apart; else the model's name carries a digest of the identity.
Must not know: how a store works. Called by: factory, backends that clear or name files, the storage
pumps.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import msgspec

from refimpl.config import require
from refimpl.keys import PageKey

SCHEME: Final = 1  # of page keys and payloads; another number means that old pages can't be read
_HASH_LETTERS: Final = 64  # a page key in hexadecimal
_SIDECAR: Final = ".xxh3"
_FILE_NAME_BYTES_MAX: Final = 255  # of Linux


def sidecar(name: str) -> str:
    """What the checksum of a page is called."""
    return name + _SIDECAR


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose KV it is. ``weights`` tells revisions of one model apart; any string that does."""

    model: str
    weights: str = ""
    dtype: str = "bfloat16"
    layout: str
    page_size: int  # tokens
    layers: int
    kv_heads: int  # of the whole model; 1 for a latent cache
    head_dim: int
    is_mla: bool = False
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over all but the rank, which names carry themselves."""
        whole = msgspec.structs.replace(self, tp_rank=0)
        return hashlib.sha256(msgspec.json.encode([SCHEME, whole])).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Names are ``prefix``, the page key in hexadecimal, ``suffix``."""

    prefix: str = ""
    suffix: str = ""

    def name(self, key: PageKey) -> str:
        """The name of a page."""
        return f"{self.prefix}{key.hex()}{self.suffix}"

    def owns(self, name: str) -> bool:
        """Is it the name of a page of this namespace, or of a page's checksum?"""
        return self.is_page(name.removesuffix(_SIDECAR))

    def is_page(self, name: str) -> bool:
        """Is it the name of a page of this namespace, rather than of something stored beside one?"""
        key = name[len(self.prefix) : len(name) - len(self.suffix)]
        is_framed = name.startswith(self.prefix) and name.endswith(self.suffix)
        return is_framed and len(key) == _HASH_LETTERS and set(key) <= set("0123456789abcdef")


def namespace_of(backend: str, identity: Identity, *, compat: str = "", tag: str = "") -> Namespace:
    """The names that ``backend`` uses for pages of ``identity``.

    ``tag`` is upstream's ``extra_backend_tag``. Raises ConfigError for an unknown ``compat``.
    """
    require(compat in ("", "sglang"), f"compat must be sglang or absent, not {compat!r}")
    model = identity.model.replace("/", "-")
    if not compat:
        model = f"{model}-{identity.digest}"
    rank = "" if identity.is_mla else f"_{identity.tp_rank}_{identity.tp_size}"
    match backend:
        case "mooncake":
            prefix = f"{tag}_{model}_" if tag else "" if compat else f"{model}_"
            return Namespace(prefix, "_" if identity.is_mla else f"_{identity.tp_rank}")
        case "aibrix" | "dynamic" if compat:
            return Namespace()  # the class adds what it needs
        case _:
            return Namespace(suffix=f"_{model}{rank}")


def require_file_names(namespace: Namespace, ending: str) -> None:
    """Can pages and their checksums be files, ``ending`` added? Raises ConfigError where not."""
    longest = sidecar(f"{namespace.prefix}{'0' * _HASH_LETTERS}{namespace.suffix}") + ending
    length = len(longest.encode())
    require(
        length <= _FILE_NAME_BYTES_MAX,
        f"names of pages would have {length} bytes, and a file name has {_FILE_NAME_BYTES_MAX} at"
        " most: shorten the served model name",
    )
    require(
        "/" not in longest and "\0" not in longest,
        f"a page can't be a file named {longest!r}: change the model name or the tag",
    )
