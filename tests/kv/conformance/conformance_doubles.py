"""Transports whose libraries cannot run here, over doubles of these: what they are called in the suite, the
memory that they register, and the tests that say nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import double_memfabric
import double_mori
from segue.kv.ids import RankId
from segue.kv.transport.ascend import AscendTransport
from segue.kv.transport.base import EventSink, Transport
from segue.kv.transport.memory.pool_memory import Memory, host_region
from segue.kv.transport.mori import MoriTransport
from segue.kv.transport.options import TransportOptions


class AnyPages(AscendTransport):
    """The suite's memory has sizes of all kinds, and a double publishes nothing beside it."""

    page_bytes = 1


@dataclass(frozen=True)
class Double:
    """`make` gives the transport, `memory` what it registers."""

    make: Callable[[EventSink, TransportOptions], Transport]
    memory: Callable[[int], Memory]


#: What a double may still write into after a test has closed its transports, as its library would.
_KEPT: list[Memory] = []


def kept(memory: Callable[[int], Memory]) -> Callable[[int], Memory]:
    """`memory`, kept until `reset`."""

    def made(nbytes: int) -> Memory:
        _KEPT.append(memory(nbytes))
        return _KEPT[-1]

    return made


def host_memory(nbytes: int) -> Memory:
    """Memory that nobody unmaps."""
    return Memory([host_region(np.zeros(nbytes, np.uint8))])


DOUBLES = {
    "mori+double": Double(
        lambda sink, options: MoriTransport(sink, options, double_mori.modules), kept(host_memory)
    ),
    "ascend+double": Double(
        lambda sink, options: AnyPages(sink, options, double_memfabric.modules),
        kept(double_memfabric.device_memory),
    ),
}


def make(name: str, sink: EventSink, me: RankId) -> Transport:
    """The transport that is called `name` here."""
    return DOUBLES[name].make(sink, TransportOptions(me=me))


def hold(name: str) -> Callable[[], None]:
    """Have what is posted from now on land only when the answer is called, in a double that can do that; it
    goes on to read and to write whatever its transport has closed, as a network card would."""
    if name != "mori+double":
        return lambda: None
    late = double_mori.FAULTS.late = []

    def land() -> None:
        double_mori.FAULTS.late = None
        for work in late:
            double_mori.IOEngine.copy(*work)

    return land


def reset() -> None:
    """End what the doubles have started."""
    for double in (double_mori, double_memfabric):
        double.reset()
    _KEPT.clear()
