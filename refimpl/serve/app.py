"""The server as an ASGI application, and as a process.

Called by: the command line, scenarios.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from refimpl.config import ConfigError, require
from refimpl.serve.admin import Keys, admin_routes
from refimpl.serve.errors import RequestError
from refimpl.serve.info import info_routes, text_routes
from refimpl.serve.limits import BodyLimit
from refimpl.serve.loads import load_routes
from refimpl.serve.native import native_routes
from refimpl.serve.openai import openai_routes
from refimpl.serve.service import Service

PORT_MAX = 65_535
BACKLOG = 2048  # connections that wait to be accepted
_NO_OBJECT = "send a JSON object as the body, with Content-Type: application/json"
_UNREADABLE_OF_FASTAPI = "There was an error parsing the body"
_UNREADABLE = (
    "the body can't be read as JSON: it must be UTF-8, not nested hundreds of levels deep, with no"
    " number of thousands of digits"
)
STALLED_MS = 60_000  # a client that takes nothing for so long, or is out of reach, is dropped
GRACE_S = 60  # for answers that are under way when the server is told to stop


class Companion(Protocol):
    """Something beside HTTP that lives as long as the server: a socket with its thread.

    As a string it says where it is.
    """

    def start(self) -> None:
        """Before the engine starts."""

    def wind_down(self) -> None:
        """The server is about to stop: take nothing new."""

    def stop(self) -> None:
        """The engine has stopped, or never started."""


def build_app(service: Service, keys: Keys, companions: Sequence[Companion] = ()) -> FastAPI:
    """All routes over one service, whose ranks run while the application does, as do ``companions``."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for each in companions:
            each.start()
        service.ranks.start()
        yield
        for each in companions:
            each.wind_down()
        service.ranks.stop()
        for each in companions:
            each.stop()

    app = FastAPI(title="hicache-refimpl", lifespan=lifespan, docs_url="/docs")
    user = [Depends(keys.user)]
    app.include_router(openai_routes(service), dependencies=user)
    app.include_router(native_routes(service), dependencies=user)
    app.include_router(text_routes(service), dependencies=user)
    app.include_router(info_routes(service), dependencies=user)
    app.include_router(load_routes(service), dependencies=user)
    app.include_router(admin_routes(service, keys))
    app.add_middleware(BodyLimit)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    return app


def listening(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to; port 0 is any free one. Raises ConfigError."""
    require(0 <= port <= PORT_MAX, f"--port {port} must be 0 to {PORT_MAX}")
    try:
        listener = socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error}; choose another") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux; its connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
    return listener


def serve(app: FastAPI, listener: socket.socket, place: str) -> None:
    """Serve until told to stop; answers under way are finished first, and SIGTERM is no failure then.

    ``place`` is said on stderr once SIGTERM is heeded: whoever waits for it may send one at once.
    """
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S)
    server = uvicorn.Server(config)
    # For before uvicorn catches it, and for the end, when uvicorn raises what it has caught again.
    signal.signal(signal.SIGTERM, server.handle_exit)
    print(place, file=sys.stderr, flush=True)
    server.run(sockets=[listener])


async def _request_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return JSONResponse(error.body(), error.status, headers)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    """What does not fit the schema: 400 as upstream, and which field it is."""
    assert isinstance(error, RequestValidationError)
    first = _most_telling(error.errors())
    if first["type"] == "json_invalid":
        reason = f"the body is no JSON at character {first['loc'][-1]}: {first['ctx']['error']}"
        return JSONResponse(RequestError(reason).body(), 400)
    if first["loc"] == ("body",):
        return JSONResponse(RequestError(_NO_OBJECT).body(), 400)
    place = _place(*first["loc"])
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    return JSONResponse(RequestError(message, 400, place or None).body(), 400)


def _most_telling(errors: Sequence[Any]) -> dict[str, Any]:
    """Of a field that may be of several types each one complains; what is no mere other type says more."""
    telling = [error for error in errors if not error["type"].endswith("_type")]
    found: dict[str, Any] = (telling or errors)[0]
    return found


def _place(where: str, *path: int | str) -> str:
    """Which header, parameter, or field of the body; without the names of types that were tried."""
    if where != "body":
        return ".".join(map(str, path))
    return ".".join(str(part) for part in path if isinstance(part, int) or _is_a_field(part))


def _is_a_field(part: str) -> bool:
    return part.isidentifier() and part.islower() and part not in ("str", "int")


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = _UNREADABLE if error.detail == _UNREADABLE_OF_FASTAPI else str(error.detail)
    return JSONResponse(
        RequestError(detail, error.status_code).body(), error.status_code, error.headers
    )
