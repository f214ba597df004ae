"""A part that an instance cannot be without has ended: the instance says so, is unhealthy, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from deployment import deployment, lineage_engine

from segue.kv.errors import BootstrapUnreachable, Draining, ErrorCode, PeerRestarted
from segue.kv.ids import KVPoll, Role, RoomKey
from segue.server.instance import leader
from segue.server.instance import role_lifecycle as module
from segue.server.instance.instance import Instance
from segue.server.instance.role_lifecycle import run_instance
from segue.server.registry.client import RegistryClient
from segue.server.settings.commands import InstanceConfig


@pytest.mark.parametrize("error", [KeyError("a bug"), Draining("the registry says so")])
@pytest.mark.parametrize("role", [Role.DECODE, Role.UNIFIED])
def test_whatever_ends_the_keep_alive_ends_the_instance_loudly(
    role: Role, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    keep_alive = RegistryClient.keep_alive

    async def noted(self: RegistryClient) -> None:
        assert self._own is not None
        kept.append(self._own.incarnation)
        await keep_alive(self)

    monkeypatch.setattr(RegistryClient, "keep_alive", noted)
    with deployment(role) as made:
        [running] = made.running
        instance = running.instance
        assert kept == [instance.me.incarnation], "else the registry forgets it"

        async def ends() -> None:
            raise error

        assert instance._status().alive()
        instance.plane.io.post(lambda: instance._spawn(ends(), "keep-alive"))
        running.thread.join(60)
        assert not running.thread.is_alive(), "it goes on without what it cannot be without"
        assert instance.failure is not None
        expected = error.info.code if isinstance(error, Draining) else ErrorCode.INTERNAL
        assert instance.failure.info.code is expected
        assert not instance._status().alive()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.UNIFIED])
def test_the_end_of_the_io_thread_ends_every_request_and_the_instance(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is heard any more, and nothing but the end of the process tells the peers and the registry."""
    monkeypatch.setattr(leader, "ABANDON_S", 0.0)
    with deployment(role) as made:
        [running] = made.running
        instance = running.instance
        half = None if instance.manager is None else instance.manager.expect(RoomKey(7), 16, 60.0)
        instance.plane.io.post(sys.exit)  # as a bug of the loop would end it
        running.thread.join(60)
        assert not running.thread.is_alive()
        assert instance.failure is not None
        assert "the thread of the KV hand-off has ended" in instance.failure.info.text
        assert not instance._status().alive()
        if half is not None:
            assert half.poll() is KVPoll.FAILED
            assert half.error is not None
            assert half.error.code is ErrorCode.INTERNAL


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
        running.thread.join(60)
        made.io.call(asyncio.sleep(0), 60)
        for _ in range(5):
            instance.plane.io.call(asyncio.sleep(0), 60)
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
        running.thread.join(60)
        assert instance.failure is not None


@pytest.mark.parametrize(
    ("how", "status", "at_once"),
    [
        ("fails", 1, []),
        ("drains", 0, []),
        ("a signal", 0, []),
        ("two signals", 0, [128 + signal.SIGTERM]),
        ("two signals, supervised", 0, []),
    ],
)
def test_the_exit_status_says_whether_an_instance_failed_or_was_told_to_leave(
    how: str, status: int, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run_instance` as `segue unified` runs it, but for the model and what is for a whole process."""
    made: list[Instance] = []

    def make(config: InstanceConfig, engine: object, memory: object, **_: object) -> Instance:
        made.append(Instance(config, *lineage_engine()))
        return made[0]

    def ready(*_: object) -> None:
        [instance] = made
        if how == "fails":
            instance.plane.io.post(lambda: instance._spawn(ends(), "keep-alive"))
        elif how == "drains":
            instance.drain()
        else:
            for _ in range(1 + how.startswith("two signals")):
                signal.raise_signal(signal.SIGTERM)

    async def ends() -> None:
        raise PeerRestarted("the registry says that this incarnation is over")

    closed: list[str] = []
    formats = SimpleNamespace(close=lambda: closed.append("formats"))
    engine = SimpleNamespace(memory=None, formats=formats)
    monkeypatch.setattr("segue.engine.cpu.cpu_forward.load_engine", lambda *_, **__: engine)
    monkeypatch.setattr(module, "Instance", make)
    monkeypatch.setattr(module, "frozen_imports", contextlib.nullcontext)
    monkeypatch.setattr(module, "importlib", SimpleNamespace(import_module=lambda _: None))
    monkeypatch.setattr(module, "gc", SimpleNamespace(collect=lambda: None, freeze=lambda: None))
    monkeypatch.setattr(module.sys, "setswitchinterval", lambda _: None)
    ended: list[int] = []
    monkeypatch.setattr(module, "os", SimpleNamespace(environ={}, _exit=ended.append))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with deployment(Role.UNIFIED) as others:
        config = others.running[0].instance.config
        assert run_instance(replace(config, port=0), on_ready=ready, supervised="supervised" in how) == status
    assert (made[0].failure is not None) == (how == "fails")
    assert closed == ["formats"], "else the process ends only when every format that waits is compiled"
    assert ended == at_once, "the second signal ends the process at once, by hand alone"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
