"""Attach, detach and clear of L3 at run time (mission M7, spec 7), and who may ask for it.

Must not know: how a backend is opened. Called by: app.
"""

from __future__ import annotations

import hmac
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict

from refimpl.config import ConfigError, PrefetchConfig, require
from refimpl.messages import AttachStorage, ClearStorage, DetachStorage
from refimpl.run.extra_config import prefetch_of, read_extra_config
from refimpl.serve.errors import RequestError
from refimpl.serve.limits import Text
from refimpl.serve.openapi import JSON, TEXT
from refimpl.serve.service import Service, Storage

OPEN = ("/health", "/ready", "/metrics")
NO_KEY = (
    "This endpoint requires admin API key, and this server has none:"
    " start it with --admin-api-key, or without --strict-admin"
)


class AttachBody(BaseModel):
    """The body of ``PUT /hicache/storage-backend``. ``drain`` is ours: none, queue or refuse."""

    model_config = ConfigDict(extra="forbid")

    hicache_storage_backend: Text
    hicache_storage_backend_extra_config_json: Text | None = None
    hicache_storage_prefetch_policy: Text | None = None
    hicache_write_policy: Text | None = None
    drain: Text = "none"


class Keys:
    """Who may ask for what. Without any key the server is open; it listens on loopback by default."""

    def __init__(self, api_key: str | None, admin_key: str | None, *, strict: bool) -> None:
        self._api, self._admin, self._strict = api_key, admin_key, strict

    def lets_in(self, given: str | None) -> bool:
        """Is ``given`` the key that every request needs, or is there none?"""
        return self._api is None or _is_equal(given or "", self._api)

    async def user(self, request: Request) -> None:
        """Any request; health and metrics are open to all (spec 7)."""
        if self._api is not None and not request.url.path.startswith(OPEN):
            _require(request, self._api)

    async def admin(self, request: Request) -> None:
        """A change of the server itself: the admin key where there is one, else the API key."""
        if self._admin is None and self._strict:
            raise RequestError(NO_KEY, 400)
        key = self._admin or self._api
        if key is not None:
            _require(request, key)


def _require(request: Request, key: str) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not _is_equal(given, key):
        raise RequestError("Unauthorized: send the key as Authorization: Bearer KEY", 401)


def _is_equal(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())


def admin_routes(service: Service, keys: Keys) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(tags=["admin"], dependencies=[Depends(keys.admin)])
    path = "/hicache/storage-backend"

    @router.get(path, responses=JSON)
    async def status() -> JSONResponse:
        told = service.storage
        return JSONResponse(
            {
                "hicache_storage_backend": told.backend,
                "hicache_storage_backend_extra_config": told.extra_config,
                "hicache_storage_prefetch_policy": told.prefetch_policy,
                "hicache_write_policy": told.write_policy,
            }
        )

    @router.put(path, responses=TEXT, response_class=PlainTextResponse)
    async def attach(body: AttachBody) -> Response:
        failed = "Failed to attach HiCache storage backend.\n"
        extra = body.hicache_storage_backend_extra_config_json
        try:
            prefetch = _prefetch(service, body.hicache_storage_backend, extra)
            _check_same_store(service, body.hicache_storage_backend, extra)
        except ConfigError as error:
            return PlainTextResponse(f"{failed}{error}\n", 400)
        event = AttachStorage(
            body.hicache_storage_backend,
            body.hicache_storage_prefetch_policy,
            body.hicache_write_policy,
            body.drain,
            extra or "",
            prefetch,
        )
        answer = await service.changes.change(event)
        if not answer.ok:
            return PlainTextResponse(f"{failed}{answer.message}\n", 400)
        service.storage = Storage(
            body.hicache_storage_backend,
            service.storage.extra_config if extra is None else extra,
            body.hicache_storage_prefetch_policy or prefetch.policy,
            body.hicache_write_policy or service.storage.write_policy,
        )
        return PlainTextResponse(f"HiCache storage backend attached.\n{answer.message}\n")

    @router.delete(path, responses=TEXT, response_class=PlainTextResponse)
    async def detach(drain: str = "none") -> Response:
        answer = await service.changes.change(DetachStorage(drain))
        if not answer.ok:
            failed = "Failed to detach HiCache storage backend.\n"
            return PlainTextResponse(f"{failed}{answer.message}\n", 400)
        service.storage.backend = service.storage.extra_config = None
        return PlainTextResponse(f"HiCache storage backend detached.\n{answer.message}\n")

    _add_upkeep(router, service)
    return router


def _add_upkeep(router: APIRouter, service: Service) -> None:
    """What concerns pages that are stored, rather than which store there is."""

    @router.post("/hicache/storage-backend/clear", responses=TEXT, response_class=PlainTextResponse)
    async def clear() -> Response:
        answer = await service.changes.change(ClearStorage())
        if not answer.ok:
            failed = "Failed to clear the hierarchical cache storage backend.\n"
            return PlainTextResponse(f"{failed}{answer.message}\n", 400)
        return PlainTextResponse("Hierarchical cache storage backend cleared.\n")

    @router.get("/get_hicache_l3_cache_layout", responses=JSON)
    async def layout() -> JSONResponse:
        return JSONResponse(layout_of(service))


def layout_of(service: Service) -> dict[str, Any]:
    """How pages lie in L3: a page is one object a rank, named prefix, key in hexadecimal, suffix."""
    told: dict[str, Any] = {
        "enabled": service.storage.backend is not None,
        "backend": service.storage.backend,
        "page_size": service.engine.cache.page_size,
    }
    if not told["enabled"]:
        return told | {"hicache_object_layout": None, "reason": "no storage backend is attached"}
    names = service.ranks.names()
    told["hicache_object_layout"] = {
        "pools": ["kv"],
        "key_prefix": names.prefix if names else "",
        "key_suffix": names.suffix if names else "",
        "is_mla_backend": service.model.is_mla,
        "pp_rank": 0,
        "pp_size": 1,
    }
    return told


def _prefetch(service: Service, backend: str, extra: str | None) -> PrefetchConfig:
    return prefetch_of(service.prefetch, read_extra_config(extra, backend))


def _check_same_store(service: Service, backend: str, extra: str | None) -> None:
    """Policies can be updated in place; another place to store needs a detach first.

    The ranks are asked and not the mirror, which says nothing of those that a failed change left attached.
    """
    if extra is None:
        return
    theirs = read_extra_config(extra, backend).backend
    for rank, now in enumerate(service.changes.attached):
        if now is None or now.backend != backend:
            continue
        whose = f"rank {rank}: " if len(service.ranks) > 1 else ""
        require(
            read_extra_config(now.extra_config or None, backend).backend == theirs,
            f"{whose}storage backend {backend!r} is attached with other keys. Detach it first.",
        )
