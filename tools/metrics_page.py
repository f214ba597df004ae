"""Print the tables of docs/metrics.md, made from the code that publishes the metrics.

    python tools/metrics_page.py

`tests/server/observe/test_metrics_page.py` compares the page with them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from segue.kv import PathSpeed
from segue.server.instance.instance_http import InstanceStatus, StatusCollector
from segue.server.instance.operators import HandoffTotals
from segue.server.messages.control import Load
from segue.server.observe.integrity_report import NodeState
from segue.server.observe.metrics import Metrics
from segue.server.schedulers.request_figures import RequestFigures

ROOT = Path(__file__).resolve().parents[1]
_HEAD = ["| name | type | labels | unit | meaning |", "|---|---|---|---|---|"]
#: What a name ends with, apart from `_total`, and its unit.
_UNITS = {
    "bytes_per_second": "bytes/s",
    "seconds": "s",
    "bytes": "bytes",
    "tokens": "tokens",
    "pages": "pages",
    "slots": "slots",
    "perc": "0 to 1",
    "info": "",
    "ready": "0 or 1",
}


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "count")


def _row(name: str, kind: str, labels: Iterable[str], text: str) -> str:
    shown = ", ".join(f"`{label}`" for label in labels)
    full = f"{name}_total" if kind == "counter" else name
    return f"| `{full}` | {kind} | {shown} | {_unit(name)} | {text.rstrip('.')} |"


def _rows(families: Iterable[Metric], labels: dict[str, tuple[str, ...]] | None = None) -> list[str]:
    found = []
    for family in sorted(families, key=lambda family: family.name):
        if labels is not None and family.name in labels:
            names = labels[family.name]
        else:
            names = tuple(family.samples[0].labels) if family.samples else ()
        names = tuple(name for name in names if name != "le")
        found.append(_row(family.name, family.type, names, family.documentation))
    return found


def frontend() -> list[str]:
    """The metrics of a frontend."""
    metrics = Metrics()
    labels: dict[str, tuple[str, ...]] = {}
    for metric in vars(metrics).values():
        about: Any = metric
        if (names := getattr(about, "_labelnames", None)) is not None:
            labels[about._name] = tuple(names)
    return _rows(metrics.registry.collect(), labels)


async def _state() -> NodeState:
    raise NotImplementedError


def instance() -> list[str]:
    """The metrics of an instance."""
    load = Load(dp_rank=0, running=0, waiting=0, tokens=0, pages_free=1, pages_total=1, slots_total=1)
    figures, handoffs = RequestFigures(), HandoffTotals()
    figures.ended["ok"] = handoffs.ended["ok"] = 1
    speed = PathSpeed("shm", 1, 1.0)
    status = InstanceStatus(
        about={},
        load=lambda: load,
        counts=lambda: {"requests": 1},
        alive=lambda: True,
        integrity=_state,
        paths=lambda: {"peer": speed},
        figures=figures,
        handoffs=lambda: handoffs,
    )
    return _rows(StatusCollector(status).collect())


def process() -> list[str]:
    """The metrics of a frontend's and an instance's process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return _rows(registry.collect())


def vllm() -> list[str]:
    """The metrics of the connector in vLLM, by the text of their source: it imports vLLM."""
    tree = ast.parse((ROOT / "src" / "segue" / "integrations" / "vllm" / "vllm_stats.py").read_text())
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        given = {word.arg: word.value for word in node.keywords}
        if not {"name", "documentation", "labelnames"} <= given.keys():
            continue
        name, text = ast.literal_eval(given["name"]), ast.literal_eval(given["documentation"])
        labels = ["model_name", "engine"]
        if isinstance(given["labelnames"], ast.List):
            labels += [str(part.value) for part in given["labelnames"].elts if isinstance(part, ast.Constant)]
        found.append(_row(name, node.func.id, map(str, labels), text))
    return sorted(found)


#: The heading of each table.
TABLES = {
    "Frontend": frontend,
    "Instance": instance,
    "Process": process,
    "Connector in vLLM": vllm,
}


def tables() -> dict[str, str]:
    """The text of each table, by its heading."""
    return {heading: "\n".join([*_HEAD, *make()]) for heading, make in TABLES.items()}


if __name__ == "__main__":
    print("\n\n".join(f"## {heading}\n\n{table}" for heading, table in tables().items()))
