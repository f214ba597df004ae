"""The resources of this host, and the hand-off's configuration of each rank of an instance."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from segue.kv.config import KVConfig
from segue.kv.errors import ConfigError
from segue.kv.ids import ChecksumMode, Incarnation, LeaderId
from segue.server.instance import host
from segue.server.instance import kv_settings as kv
from segue.server.instance.host import this_host
from segue.server.settings.commands import InstanceConfig
from segue_lab.sim.sim_engine import lineage_spec

ME = LeaderId(Incarnation("a" * 32), 1)
SPEC = lineage_spec(8)
KiB = 1024


@pytest.mark.parametrize(
    ("files", "cores", "free_kib"),
    [
        ({}, 4, 1000),
        ({"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}, 4, 1000),
        ({"cpu.max": "250000 100000"}, 2, 1000),
        ({"cpu.max": "50000 100000"}, 1, 1000),
        ({"cpu.max": "900000 100000"}, 4, 1000),
        ({"memory.max": f"{900 * KiB}\n", "memory.current": f"{300 * KiB}\n"}, 4, 600),
        ({"memory.max": f"{9000 * KiB}", "memory.current": f"{300 * KiB}"}, 4, 1000),
        ({"memory.max": f"{300 * KiB}", "memory.current": f"{900 * KiB}"}, 4, 0),
        ({"memory.max": f"{300 * KiB}"}, 4, 1000),
        ({"pod/memory.max": f"{900 * KiB}", "pod/memory.current": f"{300 * KiB}"}, 4, 600),
    ],
    ids=str,
)
def test_a_process_has_what_both_its_host_and_its_cgroup_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int, free_kib: int
) -> None:
    kernel = {"proc/meminfo": "MemAvailable: 1000 kB\n", "proc/self/cgroup": "0::/pod\n"}
    kernel |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in kernel.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _pid: {1, 3, 5, 7})
    found = this_host(tmp_path)
    assert (found.cores, found.free_bytes) == (cores, free_kib * KiB)


@pytest.mark.parametrize(
    ("lines", "files", "cores"),
    [
        ("0::/node/pod", {"node/cpu.max": "200000 100000", "node/pod/cpu.max": "300000 100000"}, 2),
        ("0::/node/pod", {"node/pod/cpu.max": "max 100000"}, 4),
        ("0::/pod", {"unified/cgroup.controllers": "cpu memory", "unified/pod/cpu.max": "100000 100000"}, 1),
        (
            "3:cpu,cpuacct:/node/pod\n0::/",
            {"cpu/node/pod/cpu.cfs_quota_us": "250000", "cpu/node/pod/cpu.cfs_period_us": "100000"},
            2,
        ),
        (
            "3:cpuacct,cpu:/node/pod\n0::/",
            {"cpuacct,cpu/node/cpu.cfs_quota_us": "50000", "cpuacct,cpu/node/cpu.cfs_period_us": "100000"},
            1,
        ),
        (
            "3:cpu,cpuacct:/pod",
            {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"},  # in a container
            3,
        ),
        ("3:cpu:/pod", {"cpu/pod/cpu.cfs_quota_us": "-1", "cpu/pod/cpu.cfs_period_us": "100000"}, 4),
        ("3:cpu:/pod", {"cpu/pod/cpu.cfs_quota_us": "1000", "cpu/pod/cpu.cfs_period_us": "0"}, 4),
    ],
)
def test_quotas_of_every_group_above_and_of_both_versions_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, files: dict[str, str], cores: int
) -> None:
    kernel = {"proc/meminfo": "MemAvailable: 1000 kB\n", "proc/self/cgroup": lines}
    kernel |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in kernel.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _pid: {1, 3, 5, 7})
    assert this_host(tmp_path).cores == cores


def made(rank: int = 0, transports: tuple[str, ...] = ("shm", "tcp"), **set_: Any) -> KVConfig:
    config = InstanceConfig(model="m", registry="http://127.0.0.1:1", dp=2, **set_)
    return kv.kv_config(config, ME, model="print", spec=SPEC, transports=transports, tls=None, rank=rank)


def test_each_rank_listens_at_the_next_port_of_its_own_and_of_what_peers_are_told() -> None:
    ports = [made(rank, data_port=7000, advertise_data_port=8000) for rank in range(3)]
    assert [(one.transport_port, one.advertise_transport_port) for one in ports] == [
        (7000, 8000),
        (7001, 8001),
        (7002, 8002),
    ]
    free = made(2)
    assert (free.transport_port, free.advertise_transport_port) == (0, None)


def test_what_an_instance_was_set_to_reaches_its_sessions() -> None:
    one = made(host="127.0.0.2", port=5, advertise_host="10.0.0.1", advertise_port=6, secret=b"s" * 32)
    assert (one.host, one.port, one.advertise, one.advertise_port) == ("127.0.0.2", 5, "10.0.0.1", 6)
    assert (one.me, one.secret, one.model, one.dp.size) == (ME, b"s" * 32, "print", 2)
    assert made().secret is None, "an empty one is none"


def test_only_bytes_that_move_have_checksums() -> None:
    assert made().kv_checksum is ChecksumMode.FULL
    assert made(kv_checksum="sampled").kv_checksum is ChecksumMode.SAMPLED
    assert made(transports=("fake",)).kv_checksum is ChecksumMode.OFF
    assert made(transports=("shm", "fake")).kv_checksum is ChecksumMode.OFF


def test_of_several_transports_those_that_work_are_offered_and_without_one_it_is_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"shm": "no memfd here", "tcp": kv.USABLE}
    monkeypatch.setattr(kv, "KINDS", SimpleNamespace(offered=lambda *_: found))
    memory: Any = None
    assert kv.usable_transports("auto", memory) == ("tcp",)
    assert "shm cannot be used, only tcp is offered: no memfd here" in caplog.text
    found["tcp"] = "no network"
    with pytest.raises(ConfigError, match="segue doctor"):
        kv.usable_transports("auto", memory)
