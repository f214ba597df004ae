"""An instance's own HTTP server (`--http-port`): is it alive, what is it, how is it doing; and, for foreign
routers, its endpoints (`server.direct.direct_routes`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from segue import __version__
from segue.kv import PathSpeed
from segue.kv.session import listening
from segue.server.direct.direct_routes import LazyDirectServer, direct_routes
from segue.server.frontend.http_server import public_guard
from segue.server.frontend.keys import ApiKeys, KeyCheck
from segue.server.frontend.refusals import HANDLERS
from segue.server.http.guarded_http import Guard, GuardedServer
from segue.server.http.host_check import HostCheck
from segue.server.http.readiness import readiness
from segue.server.instance.operators import HandoffTotals
from segue.server.messages.control import Load
from segue.server.observe.integrity_report import NodeState
from segue.server.observe.metrics import CONTENT_TYPE, histogram
from segue.server.schedulers.request_figures import RequestFigures

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """The values that the server shows; each function is called on the I/O thread for a request. `counts` are
    table sizes and counters by name, `alive` whether the leader's loop still runs, `integrity` the full
    check, `paths` the speed to each peer, `lacking` why no request should be sent here now, if there is a
    reason. The pool has `pages` of `page_tokens` tokens."""

    about: dict[str, object]
    load: Callable[[], Load | None]
    counts: Callable[[], dict[str, int]]
    alive: Callable[[], bool]
    integrity: Callable[[], Awaitable[NodeState]]
    paths: Callable[[], dict[str, PathSpeed]] = dict
    lacking: Callable[[], str] = str
    figures: RequestFigures = field(default_factory=RequestFigures)
    handoffs: Callable[[], HandoffTotals] = HandoffTotals
    page_tokens: int = 0
    pages: int = 0


class StatusCollector(Collector):
    """The instance's numbers, read when they are scraped. Names and labels that autoscalers and routers know
    are vLLM's, with its meaning: `engine` is the DP rank."""

    def __init__(self, status: InstanceStatus) -> None:
        self._status = status
        about = status.about
        self._model = {
            "model_name": str(about.get("served_model_name", "")),
            "engine": str(about.get("dp_rank", 0)),
        }

    def collect(self) -> Iterator[Metric]:
        yield from self._as_vllm()
        yield from self._handoffs()
        yield from self._own()

    def _as_vllm(self) -> Iterator[Metric]:
        status, model = self._status, self._model
        load, names, values = status.load(), list(model), list(model.values())
        gauges = (
            ("num_requests_running", "Requests in the running batch", load.running if load else 0),
            ("num_requests_waiting", "Requests that wait", load.waiting if load else 0),
            (
                "kv_cache_usage_perc",
                "Part of the KV pool that is in use or in quarantine, 0 to 1; cached prefixes count as free",
                1 - load.pages_free / load.pages_total if load and load.pages_total else 0,
            ),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        sizes = {"block_size": str(status.page_tokens), "num_gpu_blocks": str(status.pages)}
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "1; its labels are the tokens of a page and the pages of the pool",
            labels=[*names, *sizes],
        )
        info.add_metric([*values, *sizes.values()], 1)
        yield info
        figures = status.figures
        for name, text, buckets in (
            (
                "time_to_first_token",
                "Arrival here to first token; in prefill: until it is computed",
                figures.ttft,
            ),
            ("inter_token_latency", "Between two tokens of a request", figures.itl),
            ("e2e_request_latency", "Arrival here to the end, of requests that ended well", figures.e2e),
        ):
            yield histogram(f"vllm:{name}_seconds", text, names, {tuple(values): buckets})
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens of requests with a first token", figures.prompt_tokens),
            ("generation_tokens", "Tokens generated", figures.output_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=names)
            counter.add_metric(values, count)
            yield counter

    def _handoffs(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "segue_instance_requests_ended",
            "Requests that ended here, by outcome ('ok' or the error code)",
            labels=["outcome"],
        )
        for outcome, count in list(self._status.figures.ended.items()):
            ended.add_metric([outcome], count)
        yield ended
        handoffs = self._status.handoffs()
        counts = CounterMetricFamily(
            "segue_instance_handoffs",
            "Hand-offs that ended here, by outcome ('ok' or the error code)",
            labels=["outcome"],
        )
        for outcome, count in handoffs.ended.items():
            counts.add_metric([outcome], count)
        yield counts
        yield CounterMetricFamily(
            "segue_instance_handoff_bytes", "KV of hand-offs that ended well", value=handoffs.nbytes
        )
        yield histogram(
            "segue_instance_handoff_transfer_seconds",
            "Transfer of the KV of one hand-off: at prefill from its first write to its last, at decode that "
            "of the slowest last chunk",
            (),
            {(): handoffs.transfer},
        )

    def _own(self) -> Iterator[Metric]:
        load = self._status.load()
        if load is not None:
            requests = GaugeMetricFamily("segue_instance_requests", "Requests by state", labels=["state"])
            requests.add_metric(["running"], load.running)
            requests.add_metric(["waiting"], load.waiting)
            yield requests
            for name, what, found in (("pages", "KV pages", load.pages), ("slots", "Slots", load.slots)):
                family = GaugeMetricFamily(f"segue_instance_{name}", f"{what} by state", labels=["state"])
                for state, count in found.items():
                    family.add_metric([state], count)
                yield family
        counts = GaugeMetricFamily("segue_instance_table", "Entries of internal tables", labels=["table"])
        for name, count in self._status.counts().items():
            counts.add_metric([name], count)
        yield counts
        speeds = GaugeMetricFamily(
            "segue_instance_path_bytes_per_second", "Measured speed of a path", labels=["peer", "transport"]
        )
        for peer, speed in self._status.paths().items():
            if speed.nbytes:  # decode, and a prefill that has sent nothing yet, know of none
                speeds.add_metric([peer, speed.transport], speed.bytes_per_s)
        yield speeds


def start_http(
    status: InstanceStatus,
    host: str,
    port: int,
    request_s: float,
    *,
    lazy: LazyDirectServer | None = None,
    keys: ApiKeys | None = None,
    hosts: Iterable[str] = (),
) -> GuardedServer:
    """Bind and serve in the current loop; `request_s` is what one request may take to arrive (with a door:
    its head). Raises ConfigError if the port is in use.

    With `lazy` it also generates, for foreign routers. With `keys` clients must show one of them. `hosts` are
    further names of this server, for clients without a key.
    """
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    ProcessCollector(registry=registry)

    async def health(request: Request) -> Response:
        alive = status.alive()
        return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    async def ready(request: Request) -> Response:
        status_code, body = readiness(status.lacking())
        return JSONResponse(body, status_code, None if status_code == 200 else {"retry-after": "1"})

    async def server_info(request: Request) -> Response:
        return JSONResponse(status.about | {"version": __version__})

    async def integrity(request: Request) -> Response:
        return Response(msgspec.json.encode(await status.integrity()), media_type=_JSON)

    async def metrics(request: Request) -> Response:
        more = lazy.metrics.exposition() if lazy is not None else b""
        return Response(generate_latest(registry) + more, headers={"content-type": CONTENT_TYPE})

    routes: list[BaseRoute] = [
        Route("/", health),
        Route("/health", health),
        Route("/ready", ready),
        Route("/server_info", server_info),
        Route("/get_server_info", server_info),
        Route("/integrity", integrity),
        Route("/metrics", metrics),
    ]
    # Without TLS: probes, scrapers and routers have no certificate of ours.
    guard = Guard(head_s=request_s, request_s=request_s, max_requests=1)  # nobody proves anything here
    app: Any = Starlette(routes=routes, exception_handlers=HANDLERS)
    if lazy is not None:
        served = str(status.about["served_model_name"])
        app.router.routes += direct_routes(lazy, served, status.load, status.integrity)
        guard = public_guard(head_s=request_s)
        app = KeyCheck(app, keys, lazy.metrics) if keys else app
    proven = lazy is not None and keys  # without a door nobody is asked for a key
    server = GuardedServer(
        HostCheck(app, hosts=None if proven else (host, *hosts), body_of=guard.body_of),
        listening(host, port, what="the instance's HTTP server", flag="--http-port"),
        guard=guard,
        drain_s=1.0,
    )
    server.start()
    return server
