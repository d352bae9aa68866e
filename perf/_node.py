"""What Locust tells a process, and what processes tell each other.

A user asks for a chain; the director, here or in the master, grants the next one. What was played is
sent back with its rows. LocalRunner hands messages to its own process, so a plain run takes the same
way as a distributed one.
Must not know: APIs, what is in a row. Called by: _users.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

import gevent
from gevent.event import Event
from gevent.queue import SimpleQueue
from locust.runners import STATE_RUNNING, MasterRunner, WorkerRunner

from perf._director import Director
from perf._flush import flush
from perf._options import LoadOptions, read_options
from perf._player import Client, Part, Player
from perf._rows import Row, write_rows
from perf._summary import summarize
from perf._traffic import build_traffic
from refimpl.config import ConfigError, require

END_S_MAX: Final = 10  # a process has so long to send its last rows
_POLL_S: Final = 0.05

logger = logging.getLogger(__name__)


class Played(Protocol):
    """A class of users, as far as it matters here."""

    __name__: str
    host: str
    scenario: str

    def client(self, host: str, options: LoadOptions) -> Client:
        """What it asks with."""


class Node:
    """One process of a load test; ``defaults`` are the classes that run when none is chosen."""

    def __init__(self, environment: Any, defaults: Sequence[Played]) -> None:
        self._environment, self._defaults = environment, defaults
        self._runner = environment.runner
        self._player: Player | None = None
        self._parts: dict[str, Part] = {}
        self._granted: dict[str, SimpleQueue] = {}
        self._director: Director | None = None
        self._awaited: dict[str, Event] = {}
        self._names: list[str] = []
        self._is_worker = isinstance(self._runner, WorkerRunner)
        self._is_master = isinstance(self._runner, MasterRunner)
        self._listen()

    # ---- what users do --------------------------------------------------------------------------

    def step(self, name: str) -> bool:
        """Play the next chain of a class. False when there is none."""
        player, part = self._player, self._parts.get(name)
        if player is None or part is None or player.is_over:
            return False
        self._send("chain_wanted", {"class": name})
        number = self._granted[name].get()
        if number is None:
            return False
        player.play(part, number, lambda rows: self._send("chain_played", {"rows": rows}))
        return not player.is_over

    # ---- what Locust says -----------------------------------------------------------------------

    def _listen(self) -> None:
        events = self._environment.events
        events.test_start.add_listener(self._on_start)
        if not self._is_worker:
            events.test_stopping.add_listener(self._on_stopping)
            events.test_stop.add_listener(self._on_stop)
            events.quit.add_listener(self._on_quit)
            for kind, hear in (
                ("chain_wanted", self._hear_wanted),
                ("chain_played", self._hear_played),
                ("player_ended", self._hear_ended),
            ):
                self._runner.register_message(kind, hear)
        if not self._is_master:
            self._runner.register_message("classes", self._hear_classes)
            self._runner.register_message("chain_granted", self._hear_granted)
            # It waits for greenlets, and the worker must go on hearing meanwhile.
            self._runner.register_message("end", self._hear_end, concurrent=True)

    def _on_start(self, **_: Any) -> None:
        try:
            options = read_options(self._environment.parsed_options)
            if not self._is_worker:
                self._direct(options)
            if not self._is_master:
                self._prepare(options)
        except ConfigError as error:
            self._refuse(str(error))

    def _direct(self, options: LoadOptions) -> None:
        self._director = Director(options, {})
        classes = self._chosen()
        users = self._runner.target_user_count
        required = len(self._environment.user_classes)
        require(users >= required, f"{users} users can't be of {required} classes: raise --users")
        traffic = {cls.__name__: build_traffic(cls.scenario, options.traffic) for cls in classes}
        different = {id(each) for each in traffic.values()}  # equal traffic is one object
        require(
            len(different) == len(traffic),
            f"{', '.join(traffic)} would send the same requests and find each other's pages: run one",
        )
        self._director = Director(options, traffic)
        if options.flush_first:
            flush(self._environment.host or classes[0].host, options)
        self._send("classes", list(traffic))

    def _chosen(self) -> list[Played]:
        """The classes that run. A form that was not touched has chosen all, which can't be meant."""
        chosen: list[Played] = self._environment.user_classes
        available = self._environment.available_user_classes
        if self._is_headless or len(chosen) < len(available) or len(available) == 1:
            return chosen
        names = ", ".join(cls.__name__ for cls in self._defaults)
        logger.warning(f"all classes are picked, so only {names} runs: pick those that you want")
        if not self._is_master:
            self._environment.user_classes = list(self._defaults)
        return list(self._defaults)

    def _prepare(self, options: LoadOptions) -> None:
        self._forget()
        classes = [cls for cls in self._environment.user_classes if cls.__name__ in self._names]
        for cls in classes:
            traffic = build_traffic(cls.scenario, options.traffic)
            client = cls.client(self._environment.host or cls.host, options)
            self._parts[cls.__name__] = Part(cls.__name__, traffic, client)
            self._granted[cls.__name__] = SimpleQueue()
        self._player = Player(
            is_open=options.is_open,
            lag_limit_ns=options.lag_limit_ns,
            fire=self._environment.events.request.fire,
        )
        self._player.begin()

    def _forget(self) -> None:
        for part in self._parts.values():
            part.client.close()
        self._parts, self._granted, self._player = {}, {}, None

    def _on_stopping(self, **_: Any) -> None:
        """Every process sends its last rows before anything is stopped."""
        clients = [node.id for node in self._runner.clients.all] if self._is_master else ["local"]
        self._awaited = {client: Event() for client in clients}
        self._send("end", None)
        with gevent.Timeout(END_S_MAX, exception=False):
            gevent.wait(list(self._awaited.values()))

    def _on_stop(self, **_: Any) -> None:
        director = self._director
        if director is None or director.is_refused:
            return
        reasons = director.verdict()
        try:
            self._write(director)
        except OSError as error:
            reasons.append(f"the results can't be written: {error}")
        for reason in reasons:
            self._fail(f"this run is not valid: {reason}")
        if not self._is_headless:
            summarize(director)

    def _on_quit(self, **_: Any) -> None:
        if self._is_headless and self._director is not None and not self._director.is_refused:
            summarize(self._director)

    def _write(self, director: Director) -> None:
        path = director.options.results
        if path is not None:
            write_rows(director.rows, path, director.options.loop)

    # ---- what processes say to each other -------------------------------------------------------

    def _hear_wanted(self, msg: Any, **_: Any) -> None:
        assert self._director is not None
        name = msg.data["class"]
        granted = {"class": name, "number": self._director.next_chain(name, msg.node_id)}
        self._runner.send_message("chain_granted", granted, client_id=msg.node_id)

    def _hear_granted(self, msg: Any, **_: Any) -> None:
        inbox = self._granted.get(msg.data["class"])
        if inbox is not None:
            inbox.put(msg.data["number"])

    def _hear_played(self, msg: Any, **_: Any) -> None:
        assert self._director is not None
        if self._director.played([Row(*row) for row in msg.data["rows"]]):
            gevent.spawn(self._finish, self._director)

    def _hear_classes(self, msg: Any, **_: Any) -> None:
        self._names = msg.data

    def _hear_end(self, **_: Any) -> None:
        health = {} if self._player is None else self._player.end()
        for inbox in self._granted.values():
            for _user in range(self._runner.user_count):
                inbox.put(None)
        self._send("player_ended", health)

    def _hear_ended(self, msg: Any, **_: Any) -> None:
        if msg.data and self._director is not None:
            self._director.ended(msg.node_id, msg.data)
        if msg.node_id in self._awaited:
            self._awaited[msg.node_id].set()

    def _send(self, kind: str, data: Any) -> None:
        self._runner.send_message(kind, data)

    # ---- ends -----------------------------------------------------------------------------------

    @property
    def _is_headless(self) -> bool:
        return bool(self._environment.parsed_options.headless)

    def _finish(self, director: Director | None) -> None:
        """The run of ``director`` is over, though there may be time left."""
        if self._is_headless:
            self._runner.quit()
            return
        # A worker that is stopped before it has spawned its users is a stranger when it has.
        with gevent.Timeout(END_S_MAX, exception=False):
            while self._runner.state != STATE_RUNNING:
                gevent.sleep(_POLL_S)
        if self._director is director:
            self._runner.stop()

    def _refuse(self, reason: str) -> None:
        """The run can't be what was asked for, so there is none."""
        self._fail(reason)
        self._forget()
        if self._director is not None:
            self._director.is_refused = True
        if not self._is_worker:
            gevent.spawn(self._finish, self._director)

    def _fail(self, reason: str) -> None:
        logger.error(reason)
        if not self._is_headless and not self._is_worker:
            self._runner.log_exception("load generator", reason, "")  # a tab of the web interface
        self._environment.process_exit_code = 1


def is_worker(environment: Any) -> bool:
    """Does this process play for a master?"""
    return isinstance(environment.runner, WorkerRunner)
