"""Runs the Deployments of rendered manifests on this machine: a network namespace for each pod.

A pod has a root file system that is read-only but for its volumes, its own processes, its own address on a
bridge for each node, and a name server in place of the cluster's. What a container runs, its environment, its
volumes, probes, preStop hook and grace period are read from the manifest; this file has none of them.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rendered import Objects

ROOT = Path(__file__).resolve().parents[2]
CLIENT, NAME_SERVER = "10.244.0.1", "10.244.0.10"
DOMAIN = "default.svc.cluster.local"
#: From the end of a pod's readiness until no balancer sends to it any more.
FORGET_S = 3.0

#: Runs as the first process of a pod, before its container. Arguments: an empty folder for the root, then
#: KIND:SOURCE:TARGET for each mount, `--`, and the command.
INIT = r"""
set -eu
root=$1; shift
read -r _
mount -t tmpfs tmpfs "$root"
for link in /bin /sbin /lib /lib64; do [ -e $link ] && cp -a $link "$root$link"; done
while [ "$1" != -- ]; do
    kind=${1%%:*}; rest=${1#*:}; source=${rest%%:*}; target=$root${rest#*:}; shift
    mkdir -p "$target"
    case $kind in
    empty) mount -t tmpfs tmpfs "$target" ;;
    bind) mount --rbind "$source" "$target" ;;
    files) mount --bind "$source" "$target"; mount -o remount,bind,ro "$target" ;;
    esac
done
shift
mkdir -p "$root/proc"
mount -t proc proc "$root/proc"
ip link set lo up
mount -o remount,ro "$root"
exec chroot "$root" /usr/bin/env -i -C /tmp "$@" </dev/null
"""


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def missing() -> str:
    """The reason why no pod can run here; empty: it can."""
    if not (shutil.which("unshare") and shutil.which("ip") and shutil.which("nsenter")):
        return "unshare, nsenter and ip are needed"
    test = "ip link add segue-b type bridge && mount -t tmpfs tmpfs /mnt && unshare -n -p -f true"
    done = subprocess.run(["unshare", "-rnm", "sh", "-c", test], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no namespaces: {done.stderr.strip()}"


@dataclass
class Pod:
    """One pod: its process, and what its probes have found."""

    name: str
    owner: str
    template: dict[str, Any]
    address: str
    node: str
    process: subprocess.Popen[bytes]
    folder: Path
    pid: int = 0
    started: bool = False
    ready: bool = False
    ready_since: float = 0.0
    leaving: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def container(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.template["spec"]["containers"][0])

    @property
    def labels(self) -> dict[str, str]:
        return cast("dict[str, str]", self.template["metadata"]["labels"])

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


class NameServer:
    """The cluster's name server for headless Services: an A record for each pod. Answers are kept for
    `cached_s`."""

    def __init__(self, addresses: Callable[[str], list[str] | None], cached_s: float) -> None:
        self._addresses = addresses
        self._cached_s = cached_s
        self._kept: dict[str, tuple[float, list[str] | None]] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((NAME_SERVER, 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(4096)
            self._socket.sendto(self._answer(query), client)

    def _answer(self, query: bytes) -> bytes:
        labels, at = [], 12
        while size := query[at]:
            labels.append(query[at + 1 : at + 1 + size].decode())
            at += size + 1
        question = query[12 : at + 5]
        name = ".".join(labels).lower()
        service, _, domain = name.partition(".")
        found = self._known(service) if domain == DOMAIN else None
        is_a = query[at + 1 : at + 3] == b"\x00\x01"
        records = [
            b"\xc0\x0c\x00\x01\x00\x01" + struct.pack(">IH", int(self._cached_s), 4) + socket.inet_aton(one)
            for one in (found or [] if is_a else [])
        ]
        flags = 0x8580 | (3 if found is None else 0)
        return query[:2] + struct.pack(">HHHHH", flags, 1, len(records), 0, 0) + question + b"".join(records)

    def _known(self, service: str) -> list[str] | None:
        until, found = self._kept.get(service, (0.0, None))
        if time.monotonic() >= until:
            found = self._addresses(service)
            self._kept[service] = (time.monotonic() + self._cached_s, found)
        return found


class Cluster:
    """The Deployments and Services of some manifests. Run it in namespaces of its own (`enter`)."""

    def __init__(
        self,
        folder: Path,
        *,
        secrets: dict[str, Path],
        claims: dict[str, Path],
        nodes: tuple[str, ...] = ("a", "b"),
        cached_s: float = 5.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.folder = folder
        self.secrets, self.claims = secrets, claims
        self.say = say
        self.pods: list[Pod] = []
        self.objects: Objects = {}
        self.nodes = nodes
        #: nodes that nobody reaches, and on which nothing is placed
        self.gone: set[str] = set()
        self._numbers = itertools.count(2)
        self._lock = threading.RLock()
        self._past: dict[str, list[tuple[float, list[str]]]] = {}
        sh("ip", "link", "set", "lo", "up")
        # Else the bridge of a node answers for the name server too, with the address of the link of one pod.
        # When that pod leaves, the others send to nobody.
        Path("/proc/sys/net/ipv4/conf/all/arp_ignore").write_text("1")
        sh("ip", "link", "add", "core", "type", "bridge")
        for address in (CLIENT, NAME_SERVER):
            sh("ip", "address", "add", f"{address}/16", "dev", "core")
        sh("ip", "link", "set", "core", "up")
        for node in nodes:
            sh("ip", "link", "add", f"node-{node}", "type", "bridge")
            sh("ip", "link", "add", f"up-{node}", "type", "veth", "peer", "name", f"down-{node}")
            sh("ip", "link", "set", f"up-{node}", "master", f"node-{node}")
            sh("ip", "link", "set", f"down-{node}", "master", "core")
            for link in (f"node-{node}", f"up-{node}", f"down-{node}"):
                sh("ip", "link", "set", link, "up")
        self.name_server = NameServer(self.headless, cached_s)

    # ---- Services -------------------------------------------------------------------------------

    def headless(self, service: str) -> list[str] | None:
        """The addresses in a headless Service: of pods that are ready, or of all with
        `publishNotReadyAddresses`, also of those that are leaving. None: there is no such Service."""
        found = self.objects.get(("Service", service))
        if found is None:
            return None
        every = found["spec"].get("publishNotReadyAddresses", False)
        with self._lock:
            return [pod.address for pod in self.chosen(found) if every or (pod.ready and not pod.leaving)]

    def chosen(self, service: dict[str, Any]) -> list[Pod]:
        """The pods that a Service selects."""
        wanted = service["spec"]["selector"].items()
        with self._lock:
            return [pod for pod in self.pods if wanted <= pod.labels.items() and not pod.ended.is_set()]

    def endpoints(self, service: str) -> list[str]:
        """The addresses that a balancer sends to: those that were ready `FORGET_S` ago."""
        now = time.monotonic()
        with self._lock:
            ready = [
                pod.address
                for pod in self.chosen(self.objects["Service", service])
                if pod.ready and not pod.leaving
            ]
            past = self._past.setdefault(service, [])
            past.append((now, ready))
            while len(past) > 1 and past[1][0] <= now - FORGET_S:
                past.pop(0)
            return past[0][1]

    # ---- Deployments ----------------------------------------------------------------------------

    def apply(self, found: Objects) -> None:
        """Start what is new, and bring each Deployment to its template and its number of pods."""
        with self._lock:
            self.objects = found
        deployments = [one for (kind, _), one in found.items() if kind == "Deployment"]
        with ThreadPoolExecutor(len(deployments)) as threads:
            for done in [threads.submit(self._bring, one) for one in deployments]:
                done.result()

    def of(self, owner: str) -> list[Pod]:
        with self._lock:
            return [pod for pod in self.pods if pod.owner == owner and not pod.leaving]

    def _bring(self, deployment: dict[str, Any]) -> None:
        """A rolling update with maxSurge 1 and maxUnavailable 0."""
        name, spec = deployment["metadata"]["name"], deployment["spec"]
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        if not self.of(name):
            for pod in [self.start(name, spec["template"]) for _ in range(spec["replicas"])]:
                self.available(pod, 0)
            return
        while True:
            new = [pod for pod in self.of(name) if pod.template == spec["template"]]
            old = [pod for pod in self.of(name) if pod.template != spec["template"]]
            if len(new) + len(old) > spec["replicas"]:
                self.delete((old or new)[0], wait=False)
            elif len(new) < spec["replicas"]:
                lacking = 1 if old else spec["replicas"] - len(new)
                for pod in [self.start(name, spec["template"]) for _ in range(lacking)]:
                    self.available(pod, spec["minReadySeconds"])
            else:
                return

    def start(self, owner: str, template: dict[str, Any]) -> Pod:
        with self._lock:
            number = next(self._numbers)
            rest = [node for node in self.nodes if node not in self.gone]
            # Spread over the nodes, as topologySpreadConstraints ask for.
            node = min(rest, key=lambda node: sum(pod.node == node for pod in self.of(owner)))
        address = f"10.244.1.{number}"
        folder = self.folder / f"{owner}-{number}"
        (folder / "root").mkdir(parents=True)
        words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", INIT, "init"]
        words += [str(folder / "root"), *self._mounts(template, folder, address), "--"]
        container = template["spec"]["containers"][0]
        words += [f"{key}={value}" for key, value in environment(container, address).items()]
        words += [*container["command"], *container["args"]]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log)
        pod = Pod(f"{owner}-{number}", owner, template, address, node, process, folder)
        pod.pid = child_of(process.pid)
        self._connect(pod, number)
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
        with self._lock:
            self.pods.append(pod)
        threading.Thread(target=self._probe, args=(pod,), daemon=True).start()
        self.say(f"{pod.name} starts on node {node}")
        return pod

    def _mounts(self, template: dict[str, Any], folder: Path, address: str) -> Iterator[str]:
        etc = folder / "etc"
        etc.mkdir()
        (etc / "resolv.conf").write_text(
            f"nameserver {NAME_SERVER}\nsearch {DOMAIN} svc.cluster.local cluster.local\noptions ndots:5\n"
        )
        (etc / "nsswitch.conf").write_text("hosts: files dns\npasswd: files\n")
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{address} {folder.name}\n")
        (etc / "passwd").write_text("root:x:0:0::/tmp:/bin/sh\n")
        for name in ("segue/secret", "segue/keys"):
            (etc / name).mkdir(parents=True)
        yield f"files:{etc}:/etc"
        held = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, ROOT)} | {"/usr"}
        for path in sorted(held):
            if not any(path.startswith(f"{other}/") for other in held):
                yield f"files:{path}:{path}"
        for path in ("/dev", "/sys"):
            yield f"bind:{path}:{path}"
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for mount in template["spec"]["containers"][0]["volumeMounts"]:
            volume, target = volumes[mount["name"]], mount["mountPath"]
            if "emptyDir" in volume:
                yield f"empty::{target}"
            elif "secret" in volume:
                yield f"files:{self.secrets[volume['secret']['secretName']]}:{target}"
            else:
                kind = "files" if mount.get("readOnly") else "bind"
                yield f"{kind}:{self.claims[volume['persistentVolumeClaim']['claimName']]}:{target}"

    def _connect(self, pod: Pod, number: int) -> None:
        link = f"pod-{number}"
        sh("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pod.pid))
        sh("ip", "link", "set", link, "master", f"node-{pod.node}", "up")
        enter_net = ("nsenter", "-t", str(pod.pid), "-n", "ip")
        sh(*enter_net, "address", "add", f"{pod.address}/16", "dev", "eth0")
        sh(*enter_net, "link", "set", "eth0", "up")

    def available(self, pod: Pod, min_ready_s: float, within_s: float = 600.0) -> None:
        """Wait until `pod` has been ready for `min_ready_s`."""
        until = time.monotonic() + within_s
        while not (pod.ready and time.monotonic() - pod.ready_since >= min_ready_s):
            if pod.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{pod.name} is not ready: {pod.log[-3000:]}")
            time.sleep(0.1)

    def delete(self, pod: Pod, *, wait: bool = True) -> None:
        """As the kubelet does: run the preStop hook, send SIGTERM, and SIGKILL after the grace period.
        Nothing more happens to a pod that is leaving already."""
        with self._lock:
            leaving, pod.leaving = pod.leaving, True
        if not leaving:
            threading.Thread(target=self._end, args=(pod,), daemon=True).start()
        if wait:
            pod.ended.wait()

    def _end(self, pod: Pod) -> None:
        began = time.monotonic()
        grace_s = pod.template["spec"]["terminationGracePeriodSeconds"]
        hook = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        said = ""
        if hook is not None:
            try:
                done = self.run(pod, hook, grace_s)
            except subprocess.TimeoutExpired:
                said = f", preStop ended after {grace_s} s"
            else:
                said = f", preStop status {done.returncode} after {time.monotonic() - began:.1f} s"
                if done.returncode:
                    said += f" ({(done.stderr or done.stdout).strip()[-200:]})"
        with contextlib.suppress(ProcessLookupError):  # its node is gone, and with it its process
            os.kill(pod.pid, signal.SIGTERM)
        try:
            status: object = pod.process.wait(max(0.1, began + grace_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = "SIGKILL"
            pod.process.kill()
            pod.process.wait()
        with self._lock:
            pod.ended.set()
        self.say(f"{pod.name} has left: status {status} after {time.monotonic() - began:.1f} s{said}")

    def run(self, pod: Pod, command: list[str], within_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command in a pod's container."""
        variables = [f"{key}={value}" for key, value in environment(pod.container, pod.address).items()]
        words = ["nsenter", "-t", str(pod.pid), "-m", "-n", "-p", "-r", "--wd=/", "/usr/bin/env", "-i"]
        return subprocess.run(
            [*words, "-C", "/tmp", *variables, *command],
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )

    def _probe(self, pod: Pod) -> None:
        """The startup probe until it has succeeded once, then readiness and liveness."""
        failed = {"startupProbe": 0, "readinessProbe": 0, "livenessProbe": 0}
        due = dict.fromkeys(failed, 0.0)
        while not pod.ended.is_set() and pod.process.poll() is None:
            for name in ("readinessProbe", "livenessProbe") if pod.started else ("startupProbe",):
                probe = pod.container[name]
                if time.monotonic() < due[name]:
                    continue
                due[name] = time.monotonic() + probe["periodSeconds"]
                ok = asked(pod.address, probe)
                failed[name] = 0 if ok else failed[name] + 1
                if name == "startupProbe":
                    pod.started = ok
                elif name == "readinessProbe":
                    self._found(pod, ok or (pod.ready and failed[name] < probe["failureThreshold"]))
                if failed[name] >= probe["failureThreshold"] and name != "readinessProbe":
                    self.say(f"{pod.name} fails its {name}")
            pod.ended.wait(0.2)

    def _found(self, pod: Pod, ready: bool) -> None:
        if ready is pod.ready:
            return
        with self._lock:
            pod.ready, pod.ready_since = ready, time.monotonic()
        if not pod.leaving:
            self.say(f"{pod.name} is {'ready' if ready else 'not ready'}")

    # ---- nodes ----------------------------------------------------------------------------------

    def lose(self, node: str) -> None:
        """Nobody reaches the node's pods any more. They run on, and know nothing of it."""
        self.gone.add(node)
        sh("ip", "link", "set", f"down-{node}", "down")

    def evict(self, node: str) -> None:
        """The cluster gives the node up: its pods are taken off the list, and replaced on other nodes."""
        for pod in [pod for pod in self.pods if pod.node == node and not pod.ended.is_set()]:
            pod.process.kill()
            with self._lock:
                pod.leaving = True
                pod.ended.set()
        self.apply(self.objects)

    def close(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.process.kill()
            pod.process.wait()


def environment(container: dict[str, Any], address: str) -> dict[str, str]:
    """The environment of a container, and where this machine has its programs."""
    here = {
        "PATH": f"{os.path.realpath(sys.prefix)}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    fields = {"status.podIP": address, "metadata.namespace": "default"}
    for variable in container["env"]:
        source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        value = variable["value"] if source is None else fields[source]
        here[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda found: here[found[1]], value)
    return here


def asked(address: str, probe: dict[str, Any]) -> bool:
    """The outcome of an HTTP probe."""
    where = probe["httpGet"]
    connection = http.client.HTTPConnection(address, where["port"], timeout=probe["timeoutSeconds"])
    try:
        connection.request("GET", where["path"])
        return 200 <= connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def child_of(pid: int, within_s: float = 10.0) -> int:
    """The only child of a process, as soon as it has one."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        found = re.findall(r"\d+", Path(f"/proc/{pid}/task/{pid}/children").read_text())
        if found:
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError("unshare started nothing")


def enter(words: list[str]) -> None:
    """Run this program again in namespaces of its own, where it is root; once there, do nothing."""
    if os.environ.get("SEGUE_PODS") is None:
        os.environ["SEGUE_PODS"] = "1"
        os.execvp("unshare", ["unshare", "-rnm", sys.executable, *words])


def integrity(pod: Pod, port: int) -> dict[str, Any]:
    """What a part still holds."""
    connection = http.client.HTTPConnection(pod.address, port, timeout=10)
    try:
        connection.request("GET", "/integrity")
        return cast("dict[str, Any]", json.loads(connection.getresponse().read()))
    finally:
        connection.close()
