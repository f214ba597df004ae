"""The event loop of I/O threads and frontends: uvloop's, which can be closed while a name is resolved."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import uvloop

#: Names that are resolved at once, each in a thread.
MAX_LOOKUPS = 64


class EventLoop(uvloop.Loop):
    """uvloop's, with a thread of its own for each name that is resolved.

    uvloop asks libuv, whose threads nobody can interrupt. A loop that is closed waits for them, 20 s where
    the name server is silent. A process that ends before the daemon thread of such a loop crashes.
    """

    def __init__(self) -> None:
        super().__init__()
        #: by what is asked; those who ask the same share the answer
        self._lookups: dict[Any, asyncio.Future[list[Any]]] = {}

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[Any]:
        """As `socket.getaddrinfo`, which is not interrupted where the caller gives up."""
        with contextlib.suppress(socket.gaierror):  # a number needs no thread
            return socket.getaddrinfo(host, port, family, type, proto, flags | socket.AI_NUMERICHOST)
        asked = (host, port, family, type, proto, flags)
        answer = self._lookups.get(asked)
        if answer is None:
            if len(self._lookups) >= MAX_LOOKUPS:
                raise socket.gaierror(socket.EAI_AGAIN, f"{MAX_LOOKUPS} other names are being resolved")
            try:
                threading.Thread(target=self._look_up, args=(asked,), name="segue-name", daemon=True).start()
            except RuntimeError as error:  # as many threads as this process may have
                raise socket.gaierror(socket.EAI_MEMORY, str(error)) from error
            answer = self._lookups[asked] = self.create_future()
        return await asyncio.shield(answer)

    def _look_up(self, asked: tuple[Any, ...]) -> None:
        found: list[Any] | Exception
        try:
            found = socket.getaddrinfo(*asked)
        except Exception as error:  # OSError, or what a name is made of; the caller gets it
            found = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self.call_soon_threadsafe(self._looked_up, asked, found)

    def _looked_up(self, asked: tuple[Any, ...], found: list[Any] | Exception) -> None:
        answer = self._lookups.pop(asked)
        if answer.cancelled():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
            answer.exception()  # nobody may wait any more
        else:
            answer.set_result(found)
