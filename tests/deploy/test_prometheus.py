"""deploy/prometheus and deploy/grafana name metrics that exist, and a Prometheus loads and evaluates them.

Grafana has no Debian package: its own reading of segue.json is not tested.
"""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from killable import cluster, save_tokenizer

from ports import HeldPort, answering
from segue.kv.ids import Role

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TESTS = ROOT / "tests" / "deploy" / "alerts_test.yaml"
#: A row of docs/metrics.md: name, type, labels.
TABLE = re.compile(r"^\| `(\S+)` \| (\w+) \| (.*?) \|", re.M)
KEYWORDS = {"by", "or", "on"}
installed = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="prometheus is not installed: tools/system_libraries.sh --slow"
)


def rules() -> dict[str, str]:
    """The expression of each alert."""
    [group] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def panels() -> list[Any]:
    found: list[Any] = json.loads((DEPLOY / "grafana" / "segue.json").read_text())["panels"]
    return found


def expressions() -> dict[str, str]:
    """The expression of each target of the dashboard, by its panel's title and its letter."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels()
        for target in panel.get("targets", ())
    }


def published() -> dict[str, set[str]]:
    """The labels of each series that docs/metrics.md lists, and of Prometheus' own."""
    found: dict[str, set[str]] = {"up": set()}
    for name, kind, labels in TABLE.findall((ROOT / "docs" / "metrics.md").read_text()):
        has = set(re.findall(r"`(\w+)`", labels))
        found |= {name: has} if kind != "histogram" else {}
        if kind == "histogram":
            found |= {f"{name}_bucket": has | {"le"}, f"{name}_sum": has, f"{name}_count": has}
    return found


def named(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics of an expression, each with the labels that choose among its series."""
    bare = re.sub(r"\b(by|on) \([^)]*\)|\[[^\]]*\]", " ", expression)
    for name, selector in re.findall(
        r"([a-zA-Z_][\w:]*)\b(?!\s*\()(\{[^}]*\})?", re.sub(r'"[^"]*"', '""', bare)
    ):
        if name not in KEYWORDS:
            yield name, set(re.findall(r"(\w+)\s*[=!]", selector))


@pytest.mark.parametrize("source", ["dashboard", "alerts"])
def test_every_metric_and_label_that_is_asked_for_is_published(source: str) -> None:
    known = published()
    found = expressions() if source == "dashboard" else rules()
    assert len(found) > 10
    for where, expression in found.items():
        metrics = list(named(expression))
        assert metrics, where
        labels = {"instance", "job"}
        for name, chosen in metrics:
            assert name in known, f"{where}: docs/metrics.md does not list {name}"
            assert chosen <= known[name] | {"instance", "job"}, (
                f"{where}: {name} has no {chosen - known[name]}"
            )
            labels |= known[name]
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", expression))))
        assert grouped <= labels, f"{where}: no metric has {grouped - labels}"


def test_the_names_of_an_expression_are_found() -> None:
    odd = 'sum by (le, x) (rate(a:b_bucket{c="d", e!~"f|g"}[5m])) > 0.1 * max(h) or i{} / on (j) vector(0)'
    assert list(named(odd)) == [("a:b_bucket", {"c", "e"}), ("h", set()), ("i", set())]


def test_every_alert_has_a_test() -> None:
    tested = {test["name"] for test in yaml.safe_load(TESTS.read_text())["tests"]}
    assert tested == rules().keys()


@installed
@pytest.mark.slow
def test_promtool_takes_the_files_and_each_alert_fires_for_its_fault() -> None:
    folder = DEPLOY / "prometheus"
    for words in (
        ("check", "config", str(folder / "prometheus.yaml")),
        ("check", "rules", str(folder / "alerts.yaml")),
        ("test", "rules", str(TESTS)),
    ):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


class Recorded(http.server.BaseHTTPRequestHandler):
    """A page of metrics as the connector in vLLM gives it, and the scrapes of it."""

    scraped = threading.Semaphore(0)
    PAGE = b"""\
vllm:segue_handoffs_total{model_name="m",engine="0",outcome="OK"} 5
vllm:segue_kv_bytes_total{model_name="m",engine="0"} 5e6
vllm:segue_pinned_blocks{model_name="m",engine="0"} 3
vllm:segue_quarantined_blocks{model_name="m",engine="0"} 0
"""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(self.PAGE)
        self.scraped.release()

    def log_message(self, *_: Any) -> None:
        """Keep requests off the test's output."""


@contextmanager
def prometheus(folder: Path, frontend: str, instances: list[str]) -> Iterator[httpx.Client]:
    """A Prometheus with deploy's configuration and rules, and these targets."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job, targets in zip(config["scrape_configs"], ([frontend], instances), strict=True):
        job["static_configs"] = [{"targets": targets}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "prometheus" / "alerts.yaml", folder)
    held = HeldPort()
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{held.port}",
    ]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{held.port}/api/v1", timeout=30) as client,
    ):
        timer = threading.Timer(60, process.kill)
        timer.start()
        try:
            assert process.stderr is not None
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if "ready to receive web requests" in line:
                    break
            else:
                pytest.fail("".join(lines))
            drained = threading.Thread(target=process.stderr.read)
            drained.start()
            yield client
        finally:
            timer.cancel()
            process.terminate()
            process.wait(30)
            drained.join(30)


@installed
@pytest.mark.slow
def test_a_prometheus_that_scrapes_segue_evaluates_every_panel_and_alert(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, 97)
    with ExitStack() as stack:
        made = stack.enter_context(cluster(tmp_path, Role.PREFILL, Role.DECODE, http_port=0))
        body = {"prompt": list(range(3, 90)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        for _ in range(2):
            made.post("/v1/completions", body)
        # No request here is retried or continued.
        made.metrics.retries.labels("PEER_LOST").inc()
        made.metrics.continuations.labels("PEER_LOST").inc()
        recorded = stack.enter_context(answering(Recorded)).removeprefix("http://")
        doors = [running.instance.http for running in made.running]
        instances = [f"{door.address[0]}:{door.address[1]}" for door in doors if door is not None]
        frontend = str(made.http.base_url.netloc.decode())
        client = stack.enter_context(prometheus(tmp_path, frontend, [*instances, recorded]))

        def ask(expression: str) -> list[Any]:
            whole = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
            answer = client.get("/query", params={"query": whole}).json()
            assert answer["status"] == "success", f"{expression}: {answer}"
            found: list[Any] = answer["data"]["result"]
            return found

        # A rate needs two scrapes of each target.
        deadline, scraped = time.monotonic() + 60, [0]
        while min(scraped) < 2 or len(scraped) < 4:
            assert Recorded.scraped.acquire(timeout=max(0.0, deadline - time.monotonic())), scraped
            scraped = [int(series["value"][1]) for series in ask("sum_over_time(up[10m])")] or [0]
        quiet = {p["title"] for p in panels() if p.get("description", "").startswith("No data:")}
        empty = {where for where, expression in expressions().items() if not ask(expression)}
        assert {where.rsplit(" ", 1)[0] for where in empty} == quiet
        loaded = client.get("/rules").json()["data"]["groups"][0]["rules"]
        assert {rule["name"]: rule["health"] for rule in loaded} == dict.fromkeys(rules(), "ok")
