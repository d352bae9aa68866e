"""Requests over HTTP, answers as server-sent events, each read as it comes.

The client is geventhttpclient, the one of Locust's FastHttpUser, used directly: its stream hands out
an event when the event is there, and what goes wrong in one comes out as an exception here.
Must not know: workloads, Locust's users. Called by: _users, _node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError

from perf._answer import Answer, RequestError
from perf._apis import APIS
from perf._options import LoadOptions
from perf._questions import Question
from refimpl.config import require

CONNECT_S_MAX: Final = 5
_CONNECTIONS_MAX: Final = 1 << 20  # an open loop asks however many requests are under way
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_SHOWN_MAX: Final = 120  # characters of what a server said, in a reason
_BROKEN: Final = (OSError, HTTPParseError, ValueError)

Clock = Callable[[], int]
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class HttpClient:
    """All requests of one class of users to one server."""

    transport = "http"

    def __init__(self, host: str, options: LoadOptions) -> None:
        self._http = open_http(host, options.timeout_s)
        self._base = urlsplit(host).path.rstrip("/")
        self._timeout_s = options.timeout_s
        self._headers = {"Content-Type": "application/json", **authorization(options)}
        model = options.model or self._served_model(host) or "default"
        self._api = APIS[options.api](model, options.extra_body)

    def ask(self, question: Question, answer: Answer, clock: Clock) -> None:
        """Send ``question`` and note in ``answer`` what comes back. Raises RequestError, with the reason."""
        body = _encode(self._api.body(question))
        answer.sent_ns = clock()
        try:
            response = self._http.post(self._base + self._api.path, body, self._headers)
        except _BROKEN as error:
            raise RequestError(self._reason(error, "before an answer")) from None
        with response:
            if response.status_code != 200:
                raise RequestError(f"HTTP {response.status_code}: {_complaint(response)}")
            try:
                self._hear(response, answer, clock)
            except _BROKEN as error:
                raise RequestError(self._reason(error, "in mid-stream")) from None

    def close(self) -> None:
        """Give up all connections."""
        self._http.close()

    def _hear(self, response: Any, answer: Answer, clock: Clock) -> None:
        for data in events(response.readline):
            try:
                event = _decode(data)
                if "error" in event:
                    raise RequestError(f"error in the stream: {_said(event['error'])}")
                self._api.hear(event, answer, clock())
            except (
                LookupError,
                TypeError,
                AttributeError,
                ValueError,
            ):  # the decoder's are ValueErrors
                raise RequestError("malformed event in the stream") from None

    def _served_model(self, host: str) -> str:
        """What the server calls its model; empty when it does not say at once."""
        http = open_http(host, CONNECT_S_MAX)
        try:
            with http.get(f"{self._base}/v1/models", headers=self._headers) as response:
                return str(_decode(response.read())["data"][0]["id"])
        except (*_BROKEN, LookupError, TypeError):
            return ""
        finally:
            http.close()

    def _reason(self, error: Exception, when: str) -> str:
        match error:
            case TimeoutError():
                return f"nothing came for {self._timeout_s} s"
            case ConnectionRefusedError():
                return "connection refused"
            case ConnectionResetError() | HTTPConnectionClosed() | BrokenPipeError():
                return f"connection reset {when}"
            case HTTPParseError():
                return f"connection closed or garbled {when}"
            case _:
                return f"{getattr(error, 'strerror', None) or error} {when}"


def open_http(host: str, timeout_s: int) -> HTTPClient:
    """A pool of connections to ``host``. Raises ConfigError for what is no URL."""
    parts = urlsplit(host)
    is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    require(is_url, f"--host {host!r} is no URL: write http://NAME:PORT")
    return HTTPClient.from_url(
        host,
        concurrency=_CONNECTIONS_MAX,
        connection_timeout=CONNECT_S_MAX,
        network_timeout=timeout_s,
    )


def authorization(options: LoadOptions) -> dict[str, str]:
    """The header that shows the key, when there is one."""
    return {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}


def events(readline: Callable[[bytes], bytes]) -> Iterator[bytes]:
    """The data of each server-sent event, until the stream ends or says that it is done."""
    data: list[bytes] = []
    while line := readline(b"\n"):
        line = line.rstrip(b"\r\n")
        if line.startswith(_DATA):
            data.append(line[len(_DATA) :].removeprefix(b" "))
        elif not line and data:
            event = b"\n".join(data)
            data.clear()
            if event != _DONE:
                yield event


def _complaint(response: Any) -> str:
    """What the server says of its refusal, on one line."""
    text = response.read().decode("utf-8", "replace")
    try:
        said = _decode(text)
    except msgspec.DecodeError:
        return _shortened(text)
    return _said(said.get("error", said))


def _said(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return _shortened(str(text))


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_MAX else line[:_SHOWN_MAX] + "..."
