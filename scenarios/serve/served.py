"""A server on a free port of loopback, in a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from time import monotonic
from typing import Any, TypeAlias

import httpx
import uvicorn

from refimpl.run.options import Options
from refimpl.serve.admin import Keys
from refimpl.serve.app import Companion, build_app, listening
from refimpl.serve.service import Service
from refimpl.serve.start_null import start_null_service

OPTIONS = Options(
    page_size=16, max_total_tokens=1024, enable_hierarchical_cache=True, hicache_ratio="4"
)
SECONDS_MAX = 30


OPEN = Keys(None, None, strict=False)
Companions: TypeAlias = Callable[[Service], Sequence[Companion]]


@contextmanager
def serving(
    options: Options = OPTIONS,
    model: str = "tiny-gqa",
    keys: Keys | None = None,
    companions: Companions = lambda _: (),
    ranks: Any = None,
) -> Iterator[tuple[str, Service]]:
    """(URL, service) with a model; at the end the server has stopped and all its threads have ended."""
    from refimpl.run.model_choice import ModelChoice
    from refimpl.run.rank_setup import RankChoice
    from refimpl.serve.start import start_service

    choice = ModelChoice(model, "reference")
    service = start_service(options, choice, ranks=ranks or RankChoice())
    with _running(service, keys, companions) as found:
        yield found


@contextmanager
def serving_null(
    options: Options = OPTIONS,
    keys: Keys | None = None,
    companions: Companions = lambda _: (),
) -> Iterator[tuple[str, Service]]:
    """The same without a model, nor the libraries for one."""
    with _running(start_null_service(options), keys, companions) as found:
        yield found


@contextmanager
def _running(
    service: Service, keys: Keys | None, companions: Companions
) -> Iterator[tuple[str, Service]]:
    app = build_app(service, keys or OPEN, companions(service))
    with listening("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        thread = Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn")
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            _wait(url)
            yield url, service
        finally:
            server.should_exit = True
            thread.join(SECONDS_MAX)
            assert not thread.is_alive()


def _wait(url: str) -> None:
    end = monotonic() + SECONDS_MAX
    with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
        while client.get(f"{url}/health").status_code != 200:
            assert monotonic() < end, "the server does not become healthy"
