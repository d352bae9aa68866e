"""What the OpenAPI document allows, the server answers without an error of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")
pytest.importorskip("schemathesis", reason="pip install -e '.[test]'")

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from refimpl.run.options import Options
from refimpl.serve.admin import Keys
from refimpl.serve.app import build_app
from refimpl.serve.start_null import start_null_service
from scenarios.serve.served import serving_null

# Small, so that prompts reach its limits.
OPTIONS = Options(page_size=16, max_total_tokens=512, enable_hierarchical_cache=True)
OVERLOAD = 503  # says that the server is full, not that it has failed
EXAMPLES, EXAMPLES_SLOW = 8, 150
SHORT = 4  # answers and tokens

pytestmark = pytest.mark.live


def _operations() -> dict[str, Any]:
    """What can be asked for, by name; nobody asks this application."""
    app = build_app(start_null_service(OPTIONS), Keys(None, None, strict=False))
    schema = schemathesis.openapi.from_dict(app.openapi())
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


OPERATIONS = _operations()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_null(OPTIONS) as (found, _):
        yield found
        with httpx.Client(base_url=found) as client:
            assert client.get("/health").status_code == 200  # after all that


def shorten(body: Any) -> None:
    """Of a body that is valid, ask for a short answer: L1 is small, and 128 long ones take minutes."""
    if not isinstance(body, dict):
        return
    for key in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
        if body.get(key) is None or (isinstance(body[key], int) and body[key] > SHORT):
            body[key] = SHORT
    if isinstance(body.get("n"), int) and body["n"] > SHORT:
        body["n"] = SHORT
    params = body.get("sampling_params")
    for each in params if isinstance(params, list) else [params]:
        shorten(each)


def check(operation: Any, url: str, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def each(case: Any) -> None:
        shorten(case.body)
        answer = case.call(base_url=url, timeout=60)
        if answer.status_code != OVERLOAD:
            case.validate_response(answer, checks=[not_a_server_error, status_code_conformance])

    each()


def test_the_document_has_every_route_of_a_client() -> None:
    paths = {label.partition(" ")[2] for label in OPERATIONS}
    assert {"/generate", "/v1/completions", "/v1/chat/completions", "/flush_cache"} <= paths
    assert {"/hicache/storage-backend", "/v1/loads", "/tokenize", "/server_info"} <= paths


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_nothing_the_document_allows_is_a_server_error(label: str, url: str) -> None:
    check(OPERATIONS[label], url, EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_nothing_the_document_allows_is_a_server_error_at_length(label: str, url: str) -> None:
    check(OPERATIONS[label], url, EXAMPLES_SLOW)
