"""`tcp` with TLS as one more name of the suite; this process and its children share the files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from segue.core.types import RankId
from segue.session.tls import load
from segue.transport.base import EventSink, Transport
from segue.transport.kinds import KINDS
from segue.transport.options import TransportOptions

TCP_TLS = "tcp+tls"
_VARIABLE = "CONFORMANCE_TLS_FOLDER"


def make_by_name(name: str, sink: EventSink, me: RankId) -> Transport:
    """`create`, which also knows `tcp+tls`."""
    if name != TCP_TLS:
        return KINDS.create(name, sink, TransportOptions(me=me))
    folder = Path(os.environ[_VARIABLE])
    tls = load(*(str(folder / f"{part}.pem") for part in ("cert", "key", "ca")))
    return KINDS.create("tcp", sink, TransportOptions(me=me, tls=tls))


def make_files() -> None:
    """Once per session of tests, before anybody is made."""
    from tls_files import Authority

    if _VARIABLE in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="segue-conformance-"))
    authority = Authority(folder)
    made = authority.issue()
    made.cert.rename(folder / "cert.pem")
    made.key.rename(folder / "key.pem")
    os.environ[_VARIABLE] = str(folder)


def remove_files() -> None:
    folder = Path(os.environ.pop(_VARIABLE))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
