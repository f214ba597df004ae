"""`tcp` with TLS as one more name of the suite; this process and its children share the files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from segue.kv.ids import RankId
from segue.kv.limits import Limits
from segue.kv.session.tls import load_tls
from segue.kv.transport.base import EventSink, Transport
from segue.kv.transport.kinds import KINDS
from segue.kv.transport.memory.pool_memory import Memory, Region, allocate
from segue.kv.transport.options import TransportOptions

TCP_TLS = "tcp+tls"
#: Behind the name of a transport that stages: the memory is a tensor, declared as a device's.
ON_DEVICE = "+device"
_VARIABLE = "CONFORMANCE_TLS_FOLDER"
#: A process that is slow to be given a turn is let in all the same.
LIMITS = Limits(handshake_s=60.0)
STAGING_BYTES = 4 * 2**20


def make_by_name(name: str, sink: EventSink, me: RankId) -> Transport:
    """`create`, which also knows `tcp+tls`, and the double of a library."""
    if name == "library":
        from library_double import DoubleTransport  # which another process has not in its path

        return DoubleTransport(sink, TransportOptions(me=me, limits=LIMITS))
    if "+double" in name:
        import conformance_doubles  # which another process has not in its path

        return conformance_doubles.make(name, sink, me)
    name = name.removesuffix(ON_DEVICE)
    if name != TCP_TLS:
        # Small slots: what is as large as the suite's smaller blocks takes several, and waits for them.
        return KINDS.create(name, sink, TransportOptions(me=me, limits=LIMITS, staging_bytes=STAGING_BYTES))
    folder = Path(os.environ[_VARIABLE])
    tls = load_tls(*(str(folder / f"{part}.pem") for part in ("cert", "key", "ca")))
    return KINDS.create("tcp", sink, TransportOptions(me=me, limits=LIMITS, tls=tls))


def memory_by_name(name: str, nbytes: int) -> Memory:
    """The memory that the transport `name` registers."""
    if name.endswith(ON_DEVICE):
        import torch

        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        return Memory([Region(tensor.data_ptr(), nbytes, "cpu:0", owner=tensor)])
    if "+double" not in name:
        return allocate(nbytes)
    from conformance_doubles import DOUBLES

    return DOUBLES[name].memory(nbytes)


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
