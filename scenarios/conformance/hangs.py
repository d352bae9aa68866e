"""Classes that hang, exit, or are hit by what looks like Ctrl-C: each must cost a rule, not the command."""

from __future__ import annotations

from threading import Event
from typing import Any, ClassVar


class Shelf:
    """An honest store in memory."""

    lifetime = "object"
    ends: ClassVar[Event] = Event()  # set when a test lets go of what hangs

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def exists(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> bytes | None:
        return self.values.get(name)

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value


class HangsInGet(Shelf):
    def get(self, name: str) -> bytes | None:
        del name
        Shelf.ends.wait()
        return None


class HangsInClose(Shelf):
    def close(self) -> None:
        Shelf.ends.wait()


class HangsAtOpening(Shelf):
    def __init__(self) -> None:
        super().__init__()
        print("opening", flush=True)
        Shelf.ends.wait()


class HangsInAPool(Shelf):
    """Its thread would keep the process for ever."""

    def get(self, name: str) -> bytes | None:
        from concurrent.futures import ThreadPoolExecutor

        del name
        ThreadPoolExecutor(1).submit(Event().wait).result()
        return None


class Exits(Shelf):
    def exists(self, name: str) -> bool:
        del name
        raise SystemExit(7)


class ExitsAtClose(Shelf):
    def close(self) -> None:
        raise SystemExit(9)


class LeavesAGenerator(Shelf):
    def get(self, name: str) -> Any:
        del name
        raise GeneratorExit


class Interrupts(Shelf):
    def get(self, name: str) -> Any:
        del name
        raise KeyboardInterrupt
