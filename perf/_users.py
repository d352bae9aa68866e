"""The two kinds of users, and how they join in with Locust.

A user takes the next chain of its class when it is due and, in an open loop, does not wait for its end:
how many users there are does not matter then. In a closed loop they are the chains under way at once.
Must not know: workloads, messages. Called by: the locustfiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Final

from locust import User, argument_parser, events, task

from perf._http_client import HttpClient
from perf._node import Node, is_worker
from perf._options import LoadOptions, add_options
from perf._player import Client
from perf._zmq_client import ZmqClient

HOST: Final = "http://127.0.0.1:30000"
DEFAULT: Final = "Chat"  # runs when no class is named
_IDLE_S: Final = 3600.0  # a user without work sleeps until it is stopped

# Locust builds its parser again for each option that a spawn message carries, which stops a worker for
# 0.1 s at every step of the ramp. What it builds is the same each time.
argument_parser.default_args_dict = lru_cache(maxsize=1)(argument_parser.default_args_dict)


class LoadUser(User):
    """Plays chains of ``scenario``, a scenario string; empty: of the trace."""

    abstract = True
    host = HOST
    scenario: ClassVar[str] = ""
    runs_unasked: ClassVar[bool] = True  # when the file is run without naming a class
    node: ClassVar[Node | None] = None
    _is_idle = False

    @classmethod
    def client(cls, host: str, options: LoadOptions) -> Client:
        """What it asks with."""
        raise NotImplementedError

    @task
    def play(self) -> None:
        """Take the next chain."""
        assert LoadUser.node is not None
        self._is_idle = not LoadUser.node.step(type(self).__name__)

    def wait_time(self) -> float:
        """Seconds until it takes another."""
        return _IDLE_S if self._is_idle else 0.0


class HttpUser(LoadUser):
    """Asks over HTTP."""

    abstract = True

    @classmethod
    def client(cls, host: str, options: LoadOptions) -> Client:
        """One pool of connections for all users of the class."""
        return HttpClient(host, options)


class ZmqUser(LoadUser):
    """Asks over ZMQ."""

    abstract = True
    runs_unasked = False

    @classmethod
    def client(cls, host: str, options: LoadOptions) -> Client:
        """One socket for all users of the class."""
        del host  # which is for HTTP; a flush goes there
        return ZmqClient(options.zmq, options)


def _add_options(parser: Any, **_: Any) -> None:
    add_options(parser)


def _join(environment: Any, **_: Any) -> None:
    """Decide which classes run when none is named, and connect the process to the others."""
    available = environment.available_user_classes.values()
    unasked = [cls for cls in available if cls.runs_unasked]
    chosen = [cls for cls in unasked if cls.__name__ == DEFAULT] or unasked
    if is_worker(environment):
        # Its master says which classes run.
        environment.user_classes = list(available)
    elif not environment.parsed_options.user_classes:
        environment.user_classes = chosen
    LoadUser.node = Node(environment, chosen)


_events: Any = events
_events.init_command_line_parser.add_listener(_add_options)
_events.init.add_listener(_join)
