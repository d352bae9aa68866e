"""A public trace, its requests begun at their timestamps; equal blocks become equal tokens."""

from perf._users import HttpUser, ZmqUser


class TraceReplay(HttpUser):
    """The trace of --trace, over HTTP."""


class TraceReplayZmq(ZmqUser):
    """The trace of --trace, over ZMQ."""
