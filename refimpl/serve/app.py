"""The server as an ASGI application, and as a process.

Called by: the command line, scenarios.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from refimpl.config import ConfigError
from refimpl.serve.admin import Keys, admin_routes
from refimpl.serve.errors import RequestError
from refimpl.serve.info import info_routes, text_routes
from refimpl.serve.loads import load_routes
from refimpl.serve.native import native_routes
from refimpl.serve.openai import openai_routes
from refimpl.serve.service import Service

BACKLOG = 2048  # connections that wait to be accepted
GRACE_S = 60  # for answers that are under way when the server is told to stop


def build_app(service: Service, keys: Keys) -> FastAPI:
    """All routes over one service, whose bridge runs while the application does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.bridge.start()
        yield
        service.bridge.stop()

    app = FastAPI(title="hicache-refimpl", lifespan=lifespan, docs_url="/docs")
    user = [Depends(keys.user)]
    app.include_router(openai_routes(service), dependencies=user)
    app.include_router(native_routes(service), dependencies=user)
    app.include_router(text_routes(service), dependencies=user)
    app.include_router(info_routes(service), dependencies=user)
    app.include_router(load_routes(service), dependencies=user)
    app.include_router(admin_routes(service, keys))
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    return app


def listening(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to; port 0 is any free one. Raises ConfigError."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: {error}; choose another") from None


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve until told to stop; answers under way are finished first."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S)
    uvicorn.Server(config).run(sockets=[listener])


async def _request_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return JSONResponse(error.body(), error.status, headers)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    """What does not fit the schema: 400 as upstream, and which field it is."""
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    return JSONResponse(RequestError(message, 400, place or None).body(), 400)


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse(
        RequestError(str(error.detail), error.status_code).body(), error.status_code
    )
