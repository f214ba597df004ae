"""A decode engine with an agent, in a process of its own: `python agent_engine.py TRANSPORT`.

In: the prefill leader's incarnation, host, port and the room. Out: the agent's pid, then the phases.
"""

from __future__ import annotations

import os
import queue
import sys
import time

from kv_sides import DEADLINE_S, LIMITS, PAGE, spec

from segue.kv import Incarnation, KVAgent, KVConfig, KVPoll, LeaderId, Role, RoomKey, allocate


def main(transport: str) -> None:
    changes: queue.SimpleQueue[object] = queue.SimpleQueue()
    config = KVConfig(role=Role.DECODE, model="m/float32", spec=spec(), transports=[transport], limits=LIMITS)
    agent = KVAgent(config, allocate(config.spec.nbytes), changes.put)
    agent.start()
    if os.fork() == 0:  # a child that keeps what it inherits: the end of the link, too
        time.sleep(DEADLINE_S)
        os._exit(0)
    sys.stdout.write(f"{agent.pid}\n")
    sys.stdout.flush()
    incarnation, host, port, room, tokens = sys.stdin.readline().split()
    prefill = LeaderId(Incarnation(incarnation))
    agent.add_peer(prefill, host, int(port))
    receiver = agent.receive(RoomKey(int(room)), prefill, int(tokens), DEADLINE_S)
    while receiver.poll() is not KVPoll.SUCCESS:
        if receiver.poll() is KVPoll.WAITING_FOR_INPUT:
            receiver.publish(range(-(-int(tokens) // PAGE)))
        changes.get(timeout=DEADLINE_S)
    sys.stdout.write("SUCCESS\n")
    sys.stdout.flush()
    agent.close()


if __name__ == "__main__":
    main(sys.argv[1])
