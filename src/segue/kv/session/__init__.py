"""Ordered, authenticated, typed messages between processes, and the sockets and tasks under them.

The face for the server; an engine needs `segue.kv` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.kv.addresses import is_loopback as is_loopback
    from segue.kv.backoff import Backoff as Backoff
    from segue.kv.backoff import Uniform as Uniform
    from segue.kv.pending import MAX_PENDING as MAX_PENDING
    from segue.kv.session.api import PeerInfo as PeerInfo
    from segue.kv.session.api import Session as Session
    from segue.kv.session.api import SessionHandler as SessionHandler
    from segue.kv.session.deadline import Deadline as Deadline
    from segue.kv.session.dialer import Dialer as Dialer
    from segue.kv.session.event_loop import EventLoop as EventLoop
    from segue.kv.session.guarded_listener import GuardedListener as GuardedListener
    from segue.kv.session.listen import listening as listening
    from segue.kv.session.listen import url_of as url_of
    from segue.kv.session.node import SessionNode as SessionNode
    from segue.kv.session.tasks import awaited as awaited
    from segue.kv.session.tasks import background as background
    from segue.kv.session.tasks import keep_running as keep_running
    from segue.kv.session.tasks import typed as typed
    from segue.kv.session.tls import GIVE_BOTH as GIVE_BOTH
    from segue.kv.session.tls import HANDSHAKE_RECORD as HANDSHAKE_RECORD
    from segue.kv.session.tls import Tls as Tls
    from segue.kv.session.tls import TlsFiles as TlsFiles
    from segue.kv.session.tls import explain_tls as explain_tls
    from segue.kv.session.tls import not_tls as not_tls
    from segue.kv.session.tls import tls_from_files as tls_from_files
    from segue.kv.session.wire import send_at_once as send_at_once

#: The module of each name: it is imported when the name is asked for first, so that a caller who needs an
#: identifier alone does not load asyncio and numpy.
_MODULE_OF = {
    name: module
    for module, names in {
        "segue.kv.addresses": "is_loopback",
        "segue.kv.backoff": "Backoff Uniform",
        "segue.kv.session.event_loop": "EventLoop",
        "segue.kv.pending": "MAX_PENDING",
        "segue.kv.session.api": "PeerInfo Session SessionHandler",
        "segue.kv.session.deadline": "Deadline",
        "segue.kv.session.dialer": "Dialer",
        "segue.kv.session.guarded_listener": "GuardedListener",
        "segue.kv.session.listen": "listening url_of",
        "segue.kv.session.node": "SessionNode",
        "segue.kv.session.tasks": "awaited background keep_running typed",
        "segue.kv.session.tls": "GIVE_BOTH HANDSHAKE_RECORD Tls TlsFiles explain_tls not_tls tls_from_files",
        "segue.kv.session.wire": "send_at_once",
    }.items()
    for name in names.split()
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)
