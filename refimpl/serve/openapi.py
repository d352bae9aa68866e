"""What the OpenAPI document says of answers: their types and statuses, so that it is true.

Must not know: routes, the engine. Called by: every route.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

Responses: TypeAlias = dict[int | str, dict[str, Any]]

_FIELDS: Final[dict[str, Any]] = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "code": {"type": "integer"},
}
_ERROR_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error", "object", *_FIELDS],
    "properties": {
        "error": {"type": "object", "required": list(_FIELDS), "properties": _FIELDS},
        "object": {"const": "error"},
        **_FIELDS,
    },
}
_ERROR: Final = {"application/json": {"schema": _ERROR_BODY}}
_TEXT: Final = {"text/plain": {"schema": {"type": "string"}}}

# 4XX: also 404, 405 and 413; naming the class keeps FastAPI from promising a 422 that is never sent.
_WRONG: Final[Responses] = {
    400: {"description": "what the message says has to change", "content": _ERROR},
    401: {"description": "a key is needed", "content": _ERROR},
    "4XX": {"description": "what the message says has to change", "content": _ERROR},
}
JSON: Final[Responses] = {
    **_WRONG,
    503: {"description": "busy, draining or stopped: try again later", "content": _ERROR},
}
STREAMS: Final[Responses] = {
    200: {
        "description": "the answer; a stream of events where `stream` asks for one",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **JSON,
}
# Upstream answers an admin call in text, also when it refuses; what fits no schema is JSON.
TEXT: Final[Responses] = {
    200: {"description": "done", "content": _TEXT},
    **_WRONG,
    400: {"description": "refused; the text says why", "content": {**_TEXT, **_ERROR}},
}
EMPTY: Final[Responses] = {
    200: {"description": "yes; no body"},
    503: {"description": "no; no body"},
    **_WRONG,
}
EXPOSITION: Final[Responses] = {
    200: {"description": "Prometheus' text", "content": _TEXT},
    **JSON,
}
JSON_OR_EXPOSITION: Final[Responses] = {
    200: {"description": "as `format` asks", "content": {"application/json": {}, **_TEXT}},
    **JSON,
}
