"""Hand KV from one engine's own tensors to another's, without a copy: `python examples/own_memory.py`.

Prefill has a tensor `[2, pages, tokens, heads, items]` for each layer, decode `[pages, 2, heads, tokens,
items]`. Both run in this process here, and meet over tcp as they would between hosts.
"""

import queue

import numpy as np

from segue.kv import KVConfig, KVManager, KVPoll, KVShape, Role, RoomKey, Span, new_room, pool_of

LAYERS, PAGES, SIZE, HEADS, DIM, TOKENS = 4, 32, 16, 8, 64, 300
SHAPE = KVShape(layers=LAYERS, kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="float16", item_bytes=2)

computed = [np.random.rand(2, PAGES, SIZE, HEADS, DIM).astype(np.float16) for _ in range(LAYERS)]
received = [np.zeros((PAGES, 2, HEADS, SIZE, DIM), np.float16) for _ in range(LAYERS)]

# What an engine says of its memory: K and V of each layer as views [page, token, head, item], of any strides.
theirs = [(t[0], t[1]) for t in computed]
ours = [(t[:, 0].swapaxes(1, 2), t[:, 1].swapaxes(1, 2)) for t in received]


class Engine:
    def __init__(self, role, layers):
        spec, memory = pool_of(SHAPE, layers)
        self.changes = queue.Queue()
        config = KVConfig(role=role, model="demo", spec=spec, transports=["tcp"])
        self.me, self.manager = config.me, KVManager(config, memory, on_change=self.changes.put)
        self.address = self.manager.start()

    def wait(self, handle, phase):
        while handle.poll() is not phase:
            assert handle.poll() is not KVPoll.FAILED, handle.error
            self.changes.get(timeout=60)


prefill, decode = Engine(Role.PREFILL, theirs), Engine(Role.DECODE, ours)
decode.manager.add_peer(prefill.me, *prefill.address)
room, claim = RoomKey(new_room()), b"a digest of the prompt"
sender = prefill.manager.expect(room, TOKENS, budget_s=60, claim=claim)
receiver = decode.manager.receive(room, prefill.me, TOKENS, budget_s=60, claim=claim)

count = -(-TOKENS // SIZE)
from_pages, to_pages = range(3, 3 + count), range(count, 0, -1)  # any pages, in any order
decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
receiver.publish(to_pages)
sender.send(Span(0, TOKENS), from_pages, metadata=b"the first token, and what else decode needs")
decode.wait(receiver, KVPoll.SUCCESS)
prefill.wait(sender, KVPoll.SUCCESS)


def tokens_of(layers, pages):
    return [view[list(pages)].reshape(-1, HEADS, DIM)[:TOKENS] for layer in layers for view in layer]


pairs = zip(tokens_of(theirs, from_pages), tokens_of(ours, to_pages), strict=True)
print("KV", "equal" if all(np.array_equal(a, b) for a, b in pairs) else "DIFFERENT")
for handle in (sender, receiver):
    handle.clear()
for engine in (decode, prefill):
    engine.manager.close()
