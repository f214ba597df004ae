"""Tests that are coroutines, and the event loops that run them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
import uvloop

LOOPS: dict[str, Callable[[Coroutine[Any, Any, Any]], Any]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}
AsyncTest = Callable[..., Coroutine[Any, Any, None]]


def in_loop(test: AsyncTest) -> Callable[..., None]:
    """A test that runs in a loop of asyncio."""

    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


def on_each_loop(test: AsyncTest) -> Callable[..., None]:
    """A test that runs in a loop of asyncio, and in one of uvloop."""

    @wraps(test)
    def run(runner: str, **given: Any) -> None:
        LOOPS[runner](test(**given))

    signature = inspect.signature(test)
    runner = inspect.Parameter("runner", inspect.Parameter.KEYWORD_ONLY)
    wanted = [*signature.parameters.values(), runner]
    run.__signature__ = signature.replace(parameters=wanted)  # type: ignore[attr-defined]
    return pytest.mark.parametrize("runner", LOOPS)(run)
