"""KV between two engines whose managers run in agents, beside the engines: `python examples/agent.py`.

Both engines are in this process, for brevity. Its main thread never waits for the hand-off: it looks once in
each of its steps, as an engine's loop does.
"""

import queue
import time

import numpy as np

from segue import kv

TOKENS, PAGES, SIZE = 64, range(8), 8
SHAPE = kv.KVShape(layers=4, kv_heads=2, k_dim=64, v_dim=64, dtype="float16", item_bytes=2)


def engine(role):
    """An engine's tensors in memory that an agent can map, the agent, and what it reports."""
    shape = (SHAPE.layers, 2, len(PAGES), SIZE, SHAPE.kv_heads, SHAPE.k_dim)
    memory = kv.allocate(2 * int(np.prod(shape)))
    tensors = np.frombuffer(memory.buffer, np.float16, int(np.prod(shape))).reshape(shape)
    spec, memory = kv.pool_of(SHAPE, [(layer[0], layer[1]) for layer in tensors], memory=memory)
    changes = queue.SimpleQueue()
    config = kv.KVConfig(role=role, model="demo", spec=spec, transports=["shm", "tcp"])
    agent = kv.KVAgent(config, memory, changes.put, on_rank_lost=lambda error: changes.put(error))
    return tensors, agent, changes


def main():
    sent, prefill, _ = engine(kv.Role.PREFILL)
    received, decode, changes = engine(kv.Role.DECODE)
    address = prefill.start()
    decode.start()
    decode.add_peer(prefill.config.me, *address)

    room = kv.RoomKey(kv.new_room())
    sender = prefill.expect(room, TOKENS, budget_s=60)
    receiver = decode.receive(room, prefill.config.me, TOKENS, budget_s=60)
    ready = prefill.ready()
    sender.send(kv.Span(0, TOKENS), PAGES, metadata=b"42", ready=ready)  # before its KV is there
    sent[:] = np.random.default_rng(0).random(sent.shape)  # the forward
    ready.signal()

    while receiver.poll() is not kv.KVPoll.SUCCESS:
        time.sleep(0.001)  # a step
        while not changes.empty():
            match changes.get():
                case kv.Phase(phase=kv.KVPoll.WAITING_FOR_INPUT):
                    receiver.publish(PAGES)
                case kv.Phase(phase=kv.KVPoll.FAILED, error=error):
                    raise SystemExit(f"the hand-off failed: {error}")
                case kv.SegueError() as error:
                    raise SystemExit(f"the agent is lost: {error}")
    print(f"metadata {receiver.metadata.decode()}, KV {'equal' if (sent == received).all() else 'DIFFERENT'}")
    decode.close()
    prefill.close()


main()
