"""A Ray cluster of several raylets on this machine, and an application on it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import tiny_model

STORE_BYTES = 80 * 2**20
REGISTRY_PORT = 18_998


class RayHosts:
    """A head node for frontends, and nodes `work` for instances. All have one address, so ports differ."""

    def __init__(self, folder: Path, http_port: int) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self.secret = folder / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.url = f"http://127.0.0.1:{http_port}"
        self._model = tiny_model.save(folder / "tiny")
        self._cluster = Cluster()
        try:
            self._cluster.add_node(
                num_cpus=8, resources={"front": 1}, include_dashboard=False, object_store_memory=STORE_BYTES
            )
            self.nodes = [self.add_node(), self.add_node()]
            ray.init(address=self._cluster.address, log_to_driver=False)
            # A proxy on each node would share this address, and break its connections with its node.
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": http_port})
        except BaseException:
            self._cluster.shutdown()
            raise

    def add_node(self) -> Any:
        return self._cluster.add_node(num_cpus=8, resources={"work": 4}, object_store_memory=STORE_BYTES)

    def remove_node(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def config(self, **more: Any) -> dict[str, Any]:
        work = {"cpus": 0.1, "resources": {"work": 1}}
        front = {"cpus": 0.1, "resources": {"front": 1}}
        parts: dict[str, Any] = {"prefill": work, "decode": work, "frontend": front}
        for key, entries in more.items():
            parts[key] = parts[key] | entries if isinstance(entries, dict) else entries
        return {
            "model": str(self._model),
            "served_model_name": "tiny",
            "dtype": "float32",
            "kv_gib": 0.05,
            "threads_per_worker": 1,
            "secret_file": str(self.secret),
            "registry_port": REGISTRY_PORT,
            "health_check_s": 2,
            **parts,
        }

    def run(self, **more: Any) -> None:
        """Start the application, or change its counts; returns when it has them."""
        from ray import serve

        from segue.integrations.ray import build_app

        serve.run(build_app(self.config(**more)), name="segue", route_prefix="/")

    def delete(self) -> None:
        from ray import serve

        serve.delete("segue")

    def actors(self, role: str) -> list[psutil.Process]:
        """The processes of the actors of a role, as Ray names them."""
        title = f"ray::ServeReplica:segue:{role}"
        return [
            p for p in psutil.process_iter(["cmdline"]) if " ".join(p.info["cmdline"] or "").startswith(title)
        ]

    def parts(self) -> list[psutil.Process]:
        """The segue processes of this cluster: each has the secret's path among its words."""
        word = f"--secret-file={self.secret}"
        return [p for p in psutil.process_iter(["cmdline"]) if word in (p.info["cmdline"] or [])]

    def listed(self) -> list[dict[str, Any]]:
        """The instances that the registry lists, as `segue ps` shows them."""
        import ray

        registry = f"http://{ray.util.get_node_ip_address()}:{REGISTRY_PORT}"
        # Its flag is two words, so that `parts` does not find this process.
        command = [sys.executable, "-m", "segue.cli.main", "ps", "--json", "--registry", registry]
        command += ["--secret-file", str(self.secret)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def close(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


def until(done: Callable[[], bool], what: str, within_s: float = 120) -> None:
    """Wait until `done`; nobody tells a test of the end of another's process."""
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.2)
