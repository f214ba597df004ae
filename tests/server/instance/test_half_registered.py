"""A decode instance and a prefill instance of which one rank of two has registered."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import msgspec
import pytest
from deployment import LIMITS, VOCAB, Running, deployment

from segue.kv.errors import ErrorCode
from segue.kv.ids import LeaderId, Role, new_incarnation
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue_lab.sim.sim_engine import reference


@dataclass(frozen=True)
class Named:
    """As much of an instance as a ticket names."""

    me: LeaderId


def record(listener: socket.socket, dp_rank: int) -> InstanceRecord:
    host, port = listener.getsockname()
    return InstanceRecord(
        incarnation=new_incarnation(),
        role=Role.PREFILL,
        model="m",
        served_model="test",
        context_tokens=100,
        dp_size=2,
        replicas=[ReplicaRecord(dp_rank=dp_rank, host=host, port=port)],
    )


@pytest.mark.slow
def test_decode_dials_an_instance_only_when_its_last_rank_has_registered() -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    first = record(listeners[0], 0)
    second = msgspec.structs.replace(record(listeners[1], 1), incarnation=first.incarnation)
    try:
        with deployment(Role.DECODE) as made:
            [d] = made.by_role(Role.DECODE)
            client = RegistryClient(
                f"http://127.0.0.1:{made.registry.port}", secret=None, limits=LIMITS.limits()
            )
            made.io.call(client.register(first), 60)
            # A hand-off with it alone ends typed, by its deadline.
            made.front.submit("half", [1, 2, 3], Named(LeaderId(first.incarnation)), d, budget_s=0.4, only=d)
            error = made.front.wait("half")[-1].error
            assert error is not None
            assert error.code in (ErrorCode.DEADLINE_EXCEEDED, ErrorCode.BOOTSTRAP_TIMEOUT)
            # A whole instance, registered later: when it serves, decode has read of both.
            made.running.append(Running(Role.PREFILL, f"http://127.0.0.1:{made.registry.port}"))
            [p] = made.by_role(Role.PREFILL)
            made.front.join(p)
            sampling = made.front.submit("whole", [1, 2, 3], p, d)
            assert made.front.tokens("whole") == reference([1, 2, 3], sampling, VOCAB, 4)
            for listener in listeners:
                listener.setblocking(False)
                with pytest.raises(BlockingIOError):
                    listener.accept()
                listener.settimeout(60)
            made.io.call(client.register(second), 60)
            dialled, _ = listeners[0].accept()
            dialled.close()
            made.io.call(client.leave(LeaderId(first.incarnation)), 60)
            made.io.call(client.aclose(), 60)
            made.assert_comes_to_rest()
    finally:
        for listener in listeners:
            listener.close()
