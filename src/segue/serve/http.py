"""An instance's own HTTP server (`--http-port`): is it alive, what is it, how is it doing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from segue import __version__
from segue.conn.peers import PathSpeed
from segue.core.control import Load
from segue.core.errors import SegueError
from segue.observe.integrity import NodeState
from segue.observe.metrics import CONTENT_TYPE
from segue.session.guarded_http import Guard, GuardedServer
from segue.session.listen import listening

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """What the server shows; each is asked for on the I/O thread when a request comes.

    `counts` are table sizes and counters by name, `alive` whether the leader's loop still runs,
    `integrity` what a look at everything finds, `paths` the speed to each peer.
    """

    about: dict[str, object]
    load: Callable[[], Load | None]
    counts: Callable[[], dict[str, int]]
    alive: Callable[[], bool]
    integrity: Callable[[], Awaitable[NodeState]]
    paths: Callable[[], dict[str, PathSpeed]] = dict


class _StatusCollector(Collector):
    """The instance's numbers as gauges, read when they are scraped."""

    def __init__(self, status: InstanceStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        load = self._status.load()
        if load is not None:
            requests = GaugeMetricFamily("segue_instance_requests", "Requests by state", labels=["state"])
            requests.add_metric(["running"], load.running)
            requests.add_metric(["waiting"], load.waiting)
            yield requests
            pages = GaugeMetricFamily("segue_instance_pages", "KV pages by state", labels=["state"])
            used = load.pages_total - load.pages_free - load.pages_quarantined
            for state, count in (
                ("free", load.pages_free),
                ("used", used),
                ("quarantined", load.pages_quarantined),
            ):
                pages.add_metric([state], count)
            yield pages
        counts = GaugeMetricFamily("segue_instance_table", "Entries of internal tables", labels=["table"])
        for name, count in self._status.counts().items():
            counts.add_metric([name], count)
        yield counts
        speeds = GaugeMetricFamily(
            "segue_instance_path_bytes_per_second", "Measured speed of a path", labels=["peer", "transport"]
        )
        for peer, speed in self._status.paths().items():
            speeds.add_metric([peer, speed.transport], speed.bytes_per_s)
        yield speeds


def start_http(status: InstanceStatus, host: str, port: int, request_s: float) -> GuardedServer:
    """Bind and serve in the current loop; `request_s` is what one request may take to arrive. Raises
    ConfigError if the port is in use."""
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status))

    async def health(request: Request) -> Response:
        alive = status.alive()
        return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    async def server_info(request: Request) -> Response:
        return JSONResponse(status.about | {"version": __version__})

    async def integrity(request: Request) -> Response:
        try:
            state = await status.integrity()
        except SegueError as error:
            return Response(msgspec.json.encode({"error": error.info}), error.status, media_type=_JSON)
        return Response(msgspec.json.encode(state), media_type=_JSON)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE})

    routes = [
        Route("/health", health),
        Route("/server_info", server_info),
        Route("/get_server_info", server_info),
        Route("/integrity", integrity),
        Route("/metrics", metrics),
    ]
    server = GuardedServer(
        Starlette(routes=routes),
        listening(host, port, what="the instance's HTTP server", flag="--http-port"),
        # Without TLS: for probes and scrapers, which have no certificate of ours.
        guard=Guard(head_s=request_s, request_s=request_s, max_members=1),  # nobody proves anything here
        drain_s=1.0,
    )
    server.start()
    return server
