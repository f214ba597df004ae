"""A proxy between every pair of processes delays, cuts, corrupts, half-opens: no hang, no wrong token.

32 clients stream, half of them when the fault begins. While it lasts each request succeeds with the
right tokens or ends with a typed error by its deadline; after it the next one succeeds, and nobody
holds anything of those that failed.

KV moves over tcp here: that is the data pair with a network between. The data pair of `shm` is a unix
socket, by which two processes of one host exchange descriptors and nothing else could stand in between;
its ends are killed and paused in `test_kills` and `test_pauses`, which use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import traffic
from cluster import MODEL, Cluster, Registry
from faulty_proxy import FaultyProxy, Mode
from served import Served
from soak_kills import Report, Traffic, references
from tiny_model import VOCAB
from traffic import Ask, Result

from ports import HeldPort
from segue.kv.io import IoThread

pytestmark = pytest.mark.timeout(300)

BUDGET_S = 16.0
#: Beyond its deadline a request may take this long to be answered on a busy machine.
SLACK_S = 30.0
LIMITS = ("--keepalive-s", "0.3", "--peer-silence-s", "3", "--request-budget-s", str(BUDGET_S))
#: From a pair to its proxy, and to what its caller says first if others use the same listener.
PAIRS = {
    "frontend-registry": ("frontend-registry", ""),
    "instance-registry": ("instance-registry", ""),
    "frontend-prefill": ("prefill", "frontend"),
    "frontend-decode": ("decode", "frontend"),
    "prefill-decode": ("prefill", "decode"),
    "data": ("data", ""),
}
CLIENTS = 32
CASES = [(pair, mode) for pair in PAIRS for mode in Mode if mode is not Mode.NONE]
#: Each mode and each pair at least once in `make test-slow`; all of them with each other in `make soak`.
QUICK = {
    ("frontend-registry", Mode.CUT),
    ("instance-registry", Mode.CORRUPT),
    ("frontend-prefill", Mode.DELAY),
    ("frontend-decode", Mode.HALF_OPEN),
    ("prefill-decode", Mode.CUT),
    ("data", Mode.CORRUPT),
}


@dataclass
class Net:
    """A deployment whose every connection goes through a proxy, and one beside it that nobody disturbs.

    Its asks are fresh in each test, so that their KV is handed over and not found in a cache; the
    right answers come from the undisturbed one.
    """

    cluster: Cluster
    proxies: dict[str, FaultyProxy]
    calm_url: str
    asks: list[Ask] = field(default_factory=list)
    reference: dict[Ask, list[int]] = field(default_factory=dict)

    def renew(self, seed: int) -> None:
        self.asks = traffic.asks(seed, CLIENTS, vocab=VOCAB - 8, longest=300, max_tokens=150)
        self.reference = asyncio.run(references(self.calm_url, self.asks))


@pytest.fixture(scope="module")
def net(tiny: Path) -> Iterator[Net]:
    io = IoThread()
    io.start()
    registry = Registry()
    # The instances' own ports are known before they start, so proxies can stand before them.
    held = {name: HeldPort() for name in ("prefill", "decode", "data")}
    ports = {name: each.port for name, each in held.items()}
    targets = {"frontend-registry": registry.port, "instance-registry": registry.port, **ports}
    proxies = {name: FaultyProxy(io, target, seed=i) for i, (name, target) in enumerate(targets.items())}
    through = f"http://127.0.0.1:{proxies['instance-registry'].port}"
    more = {
        "prefill-0": ("--port", str(ports["prefill"]), "--advertise-port", str(proxies["prefill"].port)),
        "decode-0": (
            *("--port", str(ports["decode"]), "--advertise-port", str(proxies["decode"].port)),
            *("--data-port", str(ports["data"]), "--advertise-data-port", str(proxies["data"].port)),
        ),
    }
    calm = ("--unified", "--dtype", "float32", "--port", "0", "--kv-gib", "0.05", "--threads-per-worker", "1")
    calm += ("--model", str(tiny), "--served-model-name", MODEL)
    try:
        with (
            Served(*calm) as undisturbed,
            Cluster(
                tiny,
                flags=("--transport", "tcp", "--kv-checksum", "full", "--chunk-tokens", "64"),
                limits=LIMITS,
                more=more,
                registry=registry,
                registry_url={
                    "prefill-0": through,
                    "decode-0": through,
                    "frontend": f"http://127.0.0.1:{proxies['frontend-registry'].port}",
                },
            ) as cluster,
        ):
            yield Net(cluster, proxies, undisturbed.url)
            for proxy in proxies.values():
                proxy.mend()
    finally:
        for proxy in proxies.values():
            proxy.close()
        io.stop()


async def together(url: str, asks: list[Ask]) -> list[Result]:
    return list(await asyncio.gather(*(traffic.stream(url, MODEL, ask) for ask in asks)))


def judged(net: Net, *results: Result) -> list[str]:
    """The errors of results that are right as far as they go."""
    report = Report()
    judge = Traffic(net.cluster.url, net.asks, net.reference, report, 0).judge
    for result in results:
        judge(result)
        assert result.ended - result.began < BUDGET_S + SLACK_S, f"{result.error} came late"
    assert (report.wrong, report.untyped, report.hangs) == ([], [], 0)
    return [result.error for result in results]


async def while_broken(net: Net, proxy: FaultyProxy, mode: Mode, caller: str) -> list[Result]:
    """Half of the clients stream when the fault begins, the others come at once after it."""
    early, late = net.asks[: CLIENTS // 2], net.asks[CLIENTS // 2 :]
    first = [asyncio.Event() for _ in early]
    begun = [
        asyncio.create_task(traffic.stream(net.cluster.url, MODEL, ask, first=event))
        for ask, event in zip(early, first, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in first))
    await asyncio.to_thread(proxy.break_, mode, caller)
    later = await together(net.cluster.url, late)
    if not proxy.faults:
        await asyncio.to_thread(net.cluster.registry.stir)
    await proxy.struck(1, 60)
    return [*(await asyncio.gather(*begun)), *later]


async def healed(net: Net, within_s: float = 60) -> None:
    """The next requests succeed, after at most the pause of a redial."""
    until = time.monotonic() + within_s
    while True:
        result = await traffic.stream(net.cluster.url, MODEL, net.asks[0])
        if judged(net, result) == [""]:
            return
        assert time.monotonic() < until, f"still {result.error} {within_s} s after the fault: {result.text}"


@pytest.mark.parametrize(
    ("pair", "mode"),
    [
        pytest.param(pair, mode, marks=() if (pair, mode) in QUICK else pytest.mark.soak, id=f"{pair}-{mode}")
        for pair, mode in CASES
    ],
)
def test_a_fault_between_two_processes_loses_nothing(net: Net, pair: str, mode: Mode) -> None:
    name, caller = PAIRS[pair]
    proxy = net.proxies[name]
    net.renew(CASES.index((pair, mode)))
    results = asyncio.run(while_broken(net, proxy, mode, caller))
    codes = judged(net, *results)
    proxy.mend()
    asyncio.run(healed(net))
    states = net.cluster.rest()
    assert all(state["pages"].get("quarantined", 0) == 0 for state in states.values())
    if "registry" in pair:
        # What is known stays known while the registry is away: nobody notices.
        assert codes == [""] * len(codes)
    if mode is Mode.DELAY:
        assert codes == [""] * len(codes), "slow is not broken"
