"""Decorators of a test that runs on ranks: its body takes `(rank, world)`, then what pytest gives it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

Body = Callable[..., Any]
Test = Callable[..., None]


def _on_pool(fixture: str, *size: int) -> Callable[[Body], Test]:
    """The body runs on every rank of the pool of `size` that `fixture` gives; parameters and fixtures are pickled.

    Without a size the world is a parameter of the test.
    """

    def decorate(body: Body) -> Test:
        own = list(inspect.signature(body).parameters.values())[2 if size else 1 :]

        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, **given: Any) -> None:
            of = size or (given["world"],)
            args = [given[one.name] for one in own if size or one.name != "world"]
            request.getfixturevalue(fixture)(*of).run(test, *args)

        request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([request, *own])  # type: ignore[attr-defined]
        test.on_rank = body  # type: ignore[attr-defined]
        return test

    return decorate


on_ranks = functools.partial(_on_pool, "ranks")
on_interpreted_ranks = functools.partial(_on_pool, "interpreted")
on_hosts = functools.partial(_on_pool, "host_ranks")  # hosts, ranks of each
