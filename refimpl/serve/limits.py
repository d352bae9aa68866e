"""What a request may be at most, before anybody reads it: a bound on memory and on the time of others.

Must not know: routes, what is asked. Called by: app, bodies, routes.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refimpl.serve.errors import RequestError

BODY_BYTES_MAX: Final = 16 << 20  # some 2 million tokens as numbers
ANSWERS_MAX: Final = 4096  # of one request, prompts times n
STOPS_MAX: Final = 128  # each is looked for after every token
STOP_LENGTH_MAX: Final = 4096
_LAST: Final = {"Connection": "close"}  # or the rest of the body would be read and thrown away
_TOO_LARGE: Final = f"the body is larger than {BODY_BYTES_MAX} bytes: send fewer or shorter prompts"


def well_formed(text: str) -> str:
    """The text itself. Raises ValueError for half of a surrogate pair, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} is a lone surrogate: send whole Unicode characters"
        ) from None
    return text


Text = Annotated[str, AfterValidator(well_formed)]


def check_answers(count: int) -> None:
    """Raise RequestError where one request asks for more answers than that."""
    if count > ANSWERS_MAX:
        raise RequestError(
            f"{count} answers are more than {ANSWERS_MAX} in a request: split it, or lower n",
            param="n",
        )


class BodyLimit:
    """An application that answers 413 to bodies that are too large, declared or not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection or request, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > BODY_BYTES_MAX:
            body = RequestError(_TOO_LARGE, 413).body()
            await JSONResponse(body, 413, _LAST)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > BODY_BYTES_MAX:
                raise HTTPException(413, _TOO_LARGE, _LAST)
            return message

        await self._app(scope, counted, send)
