"""Errors as OpenAI's clients expect them: one shape, a status, a message that says what to change.

Called by: every route.
"""

from __future__ import annotations

from typing import Any, Final

_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    503: "ServiceUnavailableError",
}
_OTHER: Final = "BadRequestError"
MESSAGE_MAX: Final = 1000  # characters; messages quote what was asked, which may be megabytes


class RequestError(Exception):
    """A request that can't be served; ``status`` is that of HTTP."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        is_long = len(message) > MESSAGE_MAX
        self.message = f"{message[:MESSAGE_MAX]} …" if is_long else message
        self.status, self.param = status, param

    def body(self) -> dict[str, Any]:
        """The answer: OpenAI's clients read ``error``, upstream's the same fields beside it (spec 12.2)."""
        fields = {
            "message": self.message,
            "type": _TYPES.get(self.status, _OTHER if self.status < 500 else "InternalServerError"),
            "param": self.param,
            "code": self.status,
        }
        return {"error": fields, "object": "error", **fields}
