"""What came back for one request, noted while it comes.

Must not know: transports, APIs. Called by: _apis, the clients, _player, _rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

UNFINISHED: Final = "under way when the run ended"
NO_TOKEN: Final = "no first token"


class RequestError(Exception):
    """A request that failed; the message is the reason, equal for equal failures."""


@dataclass(slots=True)
class Answer:
    """Times are in ns since the run began; None where the thing never came."""

    sent_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    end_ns: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None  # as the server counts them
    output_events: int = 0  # events that carried text or tokens
    device_tokens: int | None = None
    host_tokens: int | None = None
    storage_tokens: int | None = None
    hit_tokens: int | None = None
    finish: str = ""
    error: str = ""
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    gaps_ns: list[int] = field(default_factory=list)  # between events that carried tokens

    def tokens_came(self, now_ns: int) -> None:
        """An event carried text or tokens; one that did not is no first token."""
        if self.last_token_ns is None:
            self.first_token_ns = now_ns
        else:
            self.gaps_ns.append(now_ns - self.last_token_ns)
        self.last_token_ns = now_ns
        self.output_events += 1

    def cached(self, hit_tokens: int | None, details: Mapping[str, Any] | None) -> None:
        """What the server says of its cache; tiers stay unknown unless it names them or hit nothing."""
        if hit_tokens is not None:
            self.hit_tokens = hit_tokens
        if details or hit_tokens == 0:
            self.tiers(details or {})

    def tiers(self, details: Mapping[str, Any]) -> None:
        """Cached tokens by tier, which some servers tell apart from their sum."""
        self.device_tokens = int(details.get("device") or 0)
        self.host_tokens = int(details.get("host") or 0)
        self.storage_tokens = int(details.get("storage") or 0)
        if self.hit_tokens is None:
            self.hit_tokens = self.device_tokens + self.host_tokens + self.storage_tokens

    def failed(self, reason: str) -> None:
        """Note why, unless something failed before."""
        self.error = self.error or reason

    def ended(self, now_ns: int) -> None:
        """Nothing more will come. Without a token, or an end the server named, it has failed."""
        self.end_ns = now_ns
        if self.finish == "abort":
            self.failed("aborted by the server")
        if self.output_events == 0:
            self.failed(NO_TOKEN)
        if not self.finish:
            self.failed("the stream ended without a finish reason")
