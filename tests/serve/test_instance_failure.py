"""A part that an instance cannot be without has ended: the instance says so, is unhealthy, and leaves."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from deployment import deployment

from segue.core.errors import BootstrapUnreachable, Draining, ErrorCode
from segue.core.types import Role


@pytest.mark.parametrize("error", [KeyError("a bug"), Draining("the registry says so")])
@pytest.mark.parametrize("role", [Role.DECODE, Role.UNIFIED])
def test_whatever_ends_the_keep_alive_ends_the_instance_loudly(role: Role, error: Exception) -> None:
    with deployment(role) as made:
        [running] = made.running
        instance = running.instance

        async def ends() -> None:
            raise error

        assert instance._status().alive()
        instance.plane.io.post(lambda: instance._spawn(ends(), "keep-alive"))
        running.thread.join(20)
        assert not running.thread.is_alive(), "it goes on without what it cannot be without"
        assert instance.failure is not None
        expected = error.info.code if isinstance(error, Draining) else ErrorCode.INTERNAL
        assert instance.failure.info.code is expected
        assert not instance._status().alive()


def test_a_registry_that_does_not_hear_of_the_drain_is_told_once_and_not_for_ever() -> None:
    with deployment(Role.UNIFIED) as made:
        [running] = made.running
        instance = running.instance
        asked: list[int] = []
        done = threading.Event()

        class Deaf:
            def __getattr__(self, name: str) -> Any:
                raise AssertionError(name)

            async def set_draining(self, *_: object) -> None:
                asked.append(1)
                if len(asked) > 1:
                    done.set()
                raise BootstrapUnreachable("the registry is away")

        registry, instance._registry = instance._registry, Deaf()  # type: ignore[assignment]
        instance.drain()
        running.thread.join(20)
        made.io.call(asyncio.sleep(0), 10)
        for _ in range(5):
            instance.plane.io.call(asyncio.sleep(0), 10)
        instance._registry = registry
        assert asked == [1]
        assert instance.failure is None, "an ordinary drain is no failure"


def test_an_http_server_that_dies_is_not_hidden() -> None:
    with deployment(Role.UNIFIED, http_port=0) as made:
        [running] = made.running
        instance = running.instance
        http = instance.http
        assert http is not None
        assert http._task is not None
        instance.plane.io.post(http._task.cancel)
        running.thread.join(20)
        assert instance.failure is not None
