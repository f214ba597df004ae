"""Behind forwarded ports peers are told where to come, for sessions and for KV each its own."""

from __future__ import annotations

import msgspec
from kv_sides import Side

from segue.kv.ids import Role
from segue.kv.transport.base import Endpoint
from segue.kv.transport.tcp.tcp_sockets import TcpAddress


def told(side: Side) -> tuple[str, int]:
    [data] = side.manager.compatibility.info.endpoints["tcp"]
    endpoint = msgspec.msgpack.decode(data, type=Endpoint)
    address = msgspec.msgpack.decode(endpoint.data, type=TcpAddress)
    return address.host, address.port


def test_the_forwarded_port_of_kv_is_not_the_one_of_sessions() -> None:
    side = Side(
        Role.PREFILL,
        transport="tcp",
        advertise="kv.example",
        advertise_port=7001,
        advertise_transport_port=7002,
    )
    try:
        assert told(side) == ("kv.example", 7002)
        side.manager.start()
        hello = side.manager.plane.node.new_handshake(False).me
        assert hello.advertised == "kv.example:7001"
    finally:
        side.close()


def test_without_forwarding_peers_are_told_where_it_listens() -> None:
    side = Side(Role.PREFILL, transport="tcp", advertise_port=7001)
    try:
        host, port = told(side)
        assert host == "127.0.0.1"
        assert port not in (0, 7001)
    finally:
        side.close()
