"""A cold start: the server's cache is flushed, and says so, or there is no run.

Called by: _node.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from geventhttpclient.response import HTTPParseError

from perf._http_client import authorization, open_http
from perf._options import LoadOptions
from refimpl.config import ConfigError, require

FLUSH_S_MAX: Final = 60


def flush(host: str, options: LoadOptions) -> None:
    """Ask the server at ``host`` to flush its cache. Raises ConfigError unless it says that it has."""
    http = open_http(host, FLUSH_S_MAX)
    path = f"{urlsplit(host).path.rstrip('/')}/flush_cache"
    try:
        with http.post(path, b"", authorization(options)) as response:
            said = " ".join(response.read().decode("utf-8", "replace").split())
            require(
                response.status_code == 200,
                f"--flush-first: the server refused, HTTP {response.status_code}: {said};"
                " wait until it is idle",
            )
    except (OSError, HTTPParseError) as error:
        raise ConfigError(f"--flush-first: {host} did not answer: {error}") from None
    finally:
        http.close()
