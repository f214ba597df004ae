"""`segue doctor`: each check in its bad case, the measurement, the registry, and what is printed."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace as NS
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from segue.cli.doctor import doctor_command as doctor
from segue.cli.doctor import host_checks, instance_checks
from segue.cli.doctor.host_checks import Check
from segue.cli.main import main
from segue.engine.cpu.processor import processor_of
from segue.engine.pool_size import Host
from segue.kv.ids import Incarnation, Role
from segue.kv.limits import Limits
from segue.kv.transport import host_speed
from segue.kv.transport.host_speed import Speed
from segue.kv.transport.kinds import KINDS, USABLE
from segue.kv.transport.memory.host_memory import GroupMemory
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.registry.registry_server import serve

GIB, MIB = 2**30, 2**20
CREATE_SERVER = socket.create_server


def listening(taken: int | None = None) -> Any:
    """`socket.create_server` where each port but `taken` is free."""

    def create_server(address: tuple[str, int]) -> socket.socket:
        if address[1] == taken:
            raise OSError(98, "In use")
        return CREATE_SERVER((address[0], 0))

    return create_server


def libc(answer: int, status: int) -> NS:
    """A C library whose `adjtimex` answers so."""

    def adjtimex(words: Any) -> int:
        words[5] = status
        return answer

    return NS(adjtimex=adjtimex)


def answer(value: object, *_given: object, **_named: object) -> object:
    if isinstance(value, OSError):
        raise value
    return value


def installed(packages: Mapping[str, str], name: str) -> str:
    if name in packages:
        return packages[name]
    raise metadata.PackageNotFoundError(name)


def look(root: Path, change: Mapping[str, Any]) -> dict[str, Check]:
    """What is said of a good host but for `change`: its files, its packages, and what calls answer."""
    given = GOOD | change
    for name, text in given.pop("files").items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    given["metadata.version"] = partial(installed, given.pop("packages"))
    given["Path"] = lambda path: root / path.lstrip("/") if isinstance(path, str) else path
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            answers = callable(attrgetter(name)(host_checks)) and not callable(value)
            patch.setattr(f"{host_checks.__name__}.{name}", partial(answer, value) if answers else value)
        found = host_checks.checks("/c")
    assert len({check.name for check in found}) == len(found)
    return {check.name: check for check in found}


CLOCK = "sys/devices/system/clocksource/clocksource0/current_clocksource"
GOOD: dict[str, Any] = {
    "files": {CLOCK: "tsc\n"},
    "packages": dict.fromkeys(host_checks.ENGINE_PACKAGES, "1.0"),
    "sys.version_info": (3, 11, 7),
    "os.environ": {},
    "os.access": True,
    "platform.system": "Linux",
    "this_processor": processor_of("flags\t: fpu avx2 avx512f amx_bf16 avx512_bf16\n", {}),
    "this_host": Host(cores=2, free_bytes=8 * GIB),
    "limited_groups": [],
    "mmap.mmap": MagicMock(),
    "shutil.disk_usage": NS(free=2**40),
    "resource.getrlimit": (8 * MIB, 8 * MIB),
    "socket.create_server": listening(),
    "ctypes.CDLL": libc(0, 0),
    "psutil.net_connections": [],
    "KINDS.available": {"shm": USABLE, "tcp": USABLE},
    "KINDS.automatic": ("shm", "tcp"),
}
CARD = {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"}
OTHER_CARD = {"sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n"}
NVIDIA = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1  Tue\nGCC\n"}
NIXL = GOOD["packages"] | {"nixl-cu12": "1.5.1"}
AMD = {"dev/kfd": "", "sys/module/amdgpu/version": "6.1\n"}
ASCEND = {"dev/davinci_manager": "", "usr/local/Ascend/driver/version.info": "25\nx\n"}
GROUPS = [GroupMemory(3 * GIB, 0), GroupMemory(2 * GIB, MIB)]
NO_TRANSPORT = {"shm": "no", "tcp": "no"}
TWO_MOONCAKES = {"mooncake-transfer-engine": "1", "mooncake-transfer-engine-non-cuda": "1"}
FORBIDDEN = OSError(1, "Not permitted")
#: Neither has /dev/shm nor the folder of models.
NO_DISK = {"shutil.disk_usage": FileNotFoundError(2, "No such file"), "os.access": False}
UCX_TCP = {"files": CARD, "os.environ": {"UCX_TLS": "tcp"}}
MC_TCP = {"files": CARD, "os.environ": {"MC_FORCE_TCP": "1"}}
MC_LISTENS = {
    "psutil.net_connections": [NS(status="LISTEN", pid=7, laddr=NS(ip="::", port=15003))],
    "files": {"proc/7/maps": "7f00-7f01 /x/Mooncake/engine.so", "proc/7/comm": "python\n"},
}


def test_a_good_host_has_nothing_to_mend(tmp_path: Path) -> None:
    found = look(tmp_path, {})
    assert [c for c in found.values() if c.state != "ok" or c.mend] == []
    assert "no limit by a cgroup" in found["memory"].found


BAD: list[tuple[dict[str, Any], str, str, str, str]] = [
    # what is different, name, state, in what was found, in what to do
    ({"sys.version_info": (3, 10, 1)}, "python", "wrong", "3.10.1", "3.11"),
    ({"platform.system": "Darwin"}, "kernel", "wrong", "Darwin", "Linux"),
    (
        {"this_processor": processor_of("flags\t: fpu avx2\n", {})},
        "cpu",
        "warn",
        "--dtype auto is float32: this processor does not multiply bfloat16 (avx2)",
        "--dtype float32",
    ),
    ({"this_processor": processor_of("", {})}, "cpu", "warn", "no vector instructions", "float32"),
    ({"this_host": Host(2, GIB), "limited_groups": GROUPS}, "memory", "warn", "have 2.0 GiB", "--kv-gib"),
    ({"resource.getrlimit": (256, 512)}, "open files", "warn", "256", "ulimit -n 1024"),
    ({"os.memfd_create": FORBIDDEN}, "shared memory", "wrong", "memfd_create: Not permitted", "seccomp"),
    ({"fcntl.fcntl": FORBIDDEN}, "shared memory", "wrong", "seals", "seccomp"),
    ({"os.pidfd_open": FORBIDDEN}, "shared memory", "warn", "pidfd_open: Not permitted", "seccomp"),
    ({"mmap.mmap": OSError(22, "Invalid argument")}, "MADV_POPULATE_WRITE", "warn", "page by page", "5.14"),
    ({"shutil.disk_usage": NS(free=MIB), "packages": NIXL}, "/dev/shm", "warn", "1 MiB", "--shm-size"),
    (NO_DISK | {"packages": NIXL}, "/dev/shm", "warn", "not there", "--shm-size"),
    ({"files": CARD}, "locked memory", "warn", "8 MiB", "ulimit -l unlimited"),
    ({"socket.create_connection": FORBIDDEN}, "loopback", "wrong", "Not permitted", "ip link"),
    ({"socket.create_server": listening(8000)}, "ports", "warn", "8000: In use", "--port"),
    ({"socket.create_server": listening(8998)}, "ports", "warn", "8998: In use", "--bootstrap-port"),
    ({"files": {CLOCK: "hpet"}}, "clocks", "warn", "slow to read", "tsc"),
    ({"ctypes.CDLL": libc(5, 0x40)}, "clocks", "warn", "not synchronised", "chrony"),
    ({"files": NVIDIA}, "accelerators", "warn", "nvidia driver 570.1", "nixl"),
    ({"files": AMD}, "accelerators", "warn", "amd driver 6.1", "amd-mori"),
    ({"files": ASCEND}, "accelerators", "warn", "ascend driver 25", "memfabric-hybrid"),
    (
        {"files": NVIDIA, "packages": {**GOOD["packages"], "torch": "2.13.0+cpu"}},
        "torch build",
        "warn",
        "2.13.0+cpu beside an NVIDIA driver",
        "CUDA build",
    ),
    ({"files": OTHER_CARD}, "rdma", "warn", "mlx5_1/1 1: DOWN", "bring the port up"),
    ({"packages": {}}, "torch", "wrong", "not installed", "segue[engine]"),
    ({"packages": TWO_MOONCAKES}, "transport libraries", "wrong", "overwrite", "uninstall"),
    (UCX_TCP, "ucx", "warn", "UCX_TLS=tcp", "unset"),
    ({"os.environ": {"MC_TCP_PROTO": "1"}}, "mooncake settings", "wrong", "before they have", "unset"),
    (MC_TCP, "mooncake settings", "warn", "not used", "unset"),
    (MC_LISTENS, "mooncake listeners", "warn", "port 15003 (python 7)", "firewall"),
    (
        {"KINDS.available": {"shm": "forbidden here", "tcp": USABLE}},
        "--transport auto",
        "warn",
        "shm does not work: forbidden here; it takes tcp",
        "shared memory",
    ),
    ({"KINDS.available": NO_TRANSPORT}, "--transport auto", "wrong", "tcp does not", "loopback"),
    ({"os.access": False}, "model cache", "wrong", "/c cannot", "--cache"),
    ({"shutil.disk_usage": NS(free=MIB)}, "model cache", "warn", "0.0 GiB", "--cache"),
]


@pytest.mark.parametrize(("change", "name", "state", "found", "mend"), BAD)
def test_what_is_bad_is_said_with_what_to_do(
    tmp_path: Path, change: dict[str, Any], name: str, state: str, found: str, mend: str
) -> None:
    check = look(tmp_path, change)[name]
    assert (check.state, found in check.found, mend in check.mend) == (state, True, True), check


@pytest.mark.parametrize(
    ("name", "fine", "bad"),
    [
        ("python", {"sys.version_info": (3, 11, 0)}, {"sys.version_info": (3, 10, 99)}),
        ("memory", {"this_host": Host(2, 3 * GIB)}, {"this_host": Host(2, 3 * GIB - 1)}),
        ("open files", {"resource.getrlimit": (1024, 1024)}, {"resource.getrlimit": (1023, 1024)}),
        (
            "/dev/shm",
            {"shutil.disk_usage": NS(free=64 * MIB), "packages": NIXL},
            {"shutil.disk_usage": NS(free=64 * MIB - 1), "packages": NIXL},
        ),
        ("/dev/shm", NO_DISK, NO_DISK | {"packages": NIXL}),
        ("locked memory", {"files": CARD, "resource.getrlimit": (-1, -1)}, {"files": CARD}),
        ("clocks", {"ctypes.CDLL": libc(-1, 0x40)}, {"ctypes.CDLL": libc(5, 0x40)}),
        ("rdma", {"files": CARD}, {"files": CARD | OTHER_CARD}),
        ("torch build", {"packages": {"torch": "2+cpu"}}, {"files": NVIDIA, "packages": {"torch": "2+cpu"}}),
        ("ucx", {"files": CARD, "os.environ": {"UCX_TLS": "tcp,rc"}}, UCX_TCP),
        ("ucx", {"os.environ": {"UCX_TLS": "tcp"}}, UCX_TCP),
        ("mooncake settings", {"os.environ": {"MC_TCP_PROTO": "0"}}, {"os.environ": {"MC_TCP_PROTO": "1"}}),
        ("mooncake settings", {"os.environ": {"MC_FORCE_TCP": "1"}}, MC_TCP),
        ("model cache", {"shutil.disk_usage": NS(free=2 * GIB)}, {"shutil.disk_usage": NS(free=2 * GIB - 1)}),
    ],
)
def test_each_bound_is_where_it_is(
    tmp_path: Path, name: str, fine: dict[str, Any], bad: dict[str, Any]
) -> None:
    assert look(tmp_path / "fine", fine)[name].state == "ok"
    assert look(tmp_path / "bad", bad)[name].state != "ok"


def test_this_host_has_what_its_transports_rely_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def named() -> dict[str, Check]:
        return {check.name: check for check in host_checks.checks(str(tmp_path / "none"))}

    found = named()
    assert {found[name].state for name in ("shared memory", "loopback", "--transport auto")} == {"ok"}
    assert found["model cache"].state != "wrong"

    def forbidden(*_args: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(host_checks.os, "pidfd_open", forbidden)
    found = named()
    assert found["shared memory"].found == "pidfd_open: Operation not permitted"
    assert "shm does not work" in found["--transport auto"].found
    assert "not permitted" in found["--transport auto"].found


def test_a_listener_of_a_process_with_mooncake_in_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read, mapped = host_checks._read, ""
    monkeypatch.setattr(host_checks, "_read", lambda path: mapped if path.endswith("/maps") else read(path))
    with CREATE_SERVER(("0.0.0.0", 0)) as server, CREATE_SERVER(("127.0.0.1", 0)) as own:
        every, loopback = (f"port {s.getsockname()[1]} " for s in (server, own))
        assert host_checks.mooncake_listeners().state == "ok"
        mapped = "/x/mooncake/engine.so"
        found = host_checks.mooncake_listeners().found
        assert every in found
        assert loopback not in found, "the one on loopback harms nobody"


# ---- transports ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_transport_is_measured_between_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_speed, "LIMIT_S", 240.0)
    speed = host_speed.measure("shm")
    assert isinstance(speed, Speed), speed
    assert (speed.transport, speed.page_us > 0, speed.gb_per_s > 0) == ("shm", True, True)


def test_a_measurement_that_fails_says_why() -> None:
    assert "unknown transport 'none'" in str(host_speed.measure("none"))


def test_a_measurement_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def hanging(_command: list[str], **arguments: Any) -> subprocess.Popen[bytes]:
        assert arguments["start_new_session"], "so that its reader is ended, too"
        started.append(real([sys.executable, "-c", "import signal; signal.pause()"], **arguments))
        return started[0]

    monkeypatch.setattr(host_speed.subprocess, "Popen", hanging)
    monkeypatch.setattr(host_speed, "LIMIT_S", 0.2)
    assert host_speed.measure("shm") == "it did not end within 0.2 s"
    assert started[0].returncode == -9


def test_a_slow_transport_is_measured_within_the_time_that_there_is() -> None:
    """It moves bytes, so to say that it moved nothing would be wrong."""
    byte_s = 1 / 200e3  # 200 KB a second: 32 MiB would take three minutes
    written: list[int] = []

    def seconds(nbytes: int) -> float:
        written.append(nbytes)
        return nbytes * byte_s

    _, bytes_per_s = host_speed.best_of(seconds)
    assert sum(written) * byte_s < host_speed.LIMIT_S / 2
    assert bytes_per_s == pytest.approx(1 / byte_s)


def test_the_best_of_several_writes_counts_and_the_first_not_at_all() -> None:
    taken = iter([9.0, 0.3, 0.1, 0.2, 0.5, 0.4, 0.25, 0.6])
    page_s, bytes_per_s = host_speed.best_of(lambda _nbytes: next(taken))
    assert page_s == 0.1
    assert bytes_per_s == 10 * host_speed.PAGE_BYTES / 0.25


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        ({"shm": 2.0, "tcp": 2.9}, None),
        (
            {"shm": 2.0, "tcp": 3.1},
            ("pairs use shm, and tcp is 1.6 times as fast here", "--transport tcp,shm"),
        ),
        ({"tcp": 1.0, "nixl": 9.0}, None),
    ],
)
def test_an_order_that_is_slower_than_another_is_a_warning(
    speeds: dict[str, float], found: tuple[str, str] | None
) -> None:
    rows = [
        doctor.TransportRow(
            name=name,
            usable=True,
            speed=Speed(transport=name, page_us=1.0, gb_per_s=speed, memory_gb_per_s=1.0),
        )
        for name, speed in speeds.items()
    ]
    checks = doctor.order_check(rows)
    assert [(check.state, check.found, check.mend) for check in checks] == (
        [("warn", *found)] if found else []
    )


def test_what_is_far_slower_than_memory_is_a_warning() -> None:
    slow = Speed(transport="nixl", page_us=90, gb_per_s=0.1, memory_gb_per_s=10)
    assert doctor.speed_check(slow).state == "warn"
    assert doctor.speed_check(msgspec.structs.replace(slow, gb_per_s=1.0)).state == "ok"
    bound = msgspec.structs.replace(slow, gb_per_s=10 / doctor.FAR_UNDER)
    assert doctor.speed_check(bound).state == "ok"
    assert doctor.speed_check(msgspec.structs.replace(bound, gb_per_s=0.99 * bound.gb_per_s)).state == "warn"


def test_what_is_usable_and_moves_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure", lambda _name: "the library ended its process")
    rows, found = doctor.transport_rows({"fake": USABLE, "shm": USABLE, "nixl": "not installed"})
    assert [(row.name, row.usable, row.why_not) for row in rows] == [
        ("fake", True, ""),
        ("shm", False, "the library ended its process"),
        ("nixl", False, "not installed"),
    ]
    assert [(c.name, c.state) for c in found] == [("transport shm", "wrong")]


# ---- the registry ----------------------------------------------------------------------------------


def instance(role: Role, word: str, **fields: object) -> InstanceRecord:
    own = {"version": "1.2", "transports": ["shm", "tcp"], "port": 9000} | fields
    model = str(own.pop("model", "weights/bfloat16"))
    dp_size = int(str(own.pop("dp_size", 1)))
    draining = bool(own.pop("draining", False))
    return InstanceRecord(
        incarnation=Incarnation(word.ljust(32, "0")),
        role=role,
        model=model,
        served_model="m",
        context_tokens=100,
        dp_size=dp_size,
        draining=draining,
        replicas=[ReplicaRecord(dp_rank=0, host="10.0.0.1", **own)],  # type: ignore[arg-type]
    )


PREFILL, DECODE = instance(Role.PREFILL, "aa"), instance(Role.DECODE, "bb")


def test_a_pair_that_fits_is_ok_with_what_both_offer() -> None:
    (check,) = instance_checks.pair_checks([PREFILL, DECODE])
    assert check.state == "ok"
    assert check.name == "prefill aa000000/0 → decode bb000000/0"
    assert "segue 1.2" in check.found
    assert "both offer shm tcp" in check.found


@pytest.mark.parametrize(
    ("decode", "state", "found"),
    [
        (instance(Role.DECODE, "bb", version="1.1"), "warn", "segue 1.2 and 1.1"),
        (instance(Role.DECODE, "bb", version=""), "warn", "does not say its version"),
        (instance(Role.DECODE, "bb", transports=["nixl"]), "wrong", "shm tcp and nixl"),
        (instance(Role.DECODE, "bb", model="other/bfloat16"), "wrong", "weights and other"),
        (instance(Role.DECODE, "bb", model="weights/float32"), "wrong", "in bfloat16, decode in float32"),
    ],
)
def test_a_pair_that_does_not_fit_says_what_differs(decode: InstanceRecord, state: str, found: str) -> None:
    (check,) = instance_checks.pair_checks([PREFILL, decode])
    assert (check.state, found in check.found, bool(check.mend)) == (state, True, True), check


def test_at_most_so_many_pairs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_checks, "MAX_PAIRS", 2)
    decodes = [instance(Role.DECODE, f"b{i}") for i in range(5)]
    found = instance_checks.pair_checks([PREFILL, *decodes])
    assert [c.state for c in found] == ["ok", "ok", "warn"]
    assert "3 more pairs" in found[-1].found


def test_an_instance_that_cannot_be_reached_or_is_not_whole_is_said() -> None:
    at = {("10.0.0.1", 9000): "Connection refused"}
    assert instance_checks.instance_checks([PREFILL, DECODE], at)[0].state == "wrong"
    half = instance(Role.PREFILL, "cc", dp_size=2)
    found = {c.name: c for c in instance_checks.instance_checks([half, DECODE], {})}
    assert found["prefill cc000000"].state == "warn"
    assert "1 of 2 ranks" in found["prefill cc000000"].found
    assert found["fleet"].state == "wrong"
    assert "no prefill" in found["fleet"].found


def test_of_which_role_nobody_is_ready_is_said_and_who_drains_is_not() -> None:
    unified = instance(Role.UNIFIED, "dd")
    for there, missing in (
        ([], "no prefill and no decode"),
        ([PREFILL], "no decode"),
        ([DECODE], "no prefill"),
        ([PREFILL, instance(Role.DECODE, "bb", draining=True)], "no decode"),
    ):
        *_, fleet = instance_checks.instance_checks(there, {})
        assert (fleet.name, missing in fleet.found) == ("fleet", True)
        assert all(c.name != "fleet" for c in instance_checks.instance_checks([*there, unified], {}))


def test_only_a_prefill_and_a_decode_of_one_served_model_are_a_pair() -> None:
    other = msgspec.structs.replace(instance(Role.DECODE, "ee"), served_model="another")
    found = instance_checks.pair_checks([PREFILL, DECODE, other, instance(Role.UNIFIED, "dd")])
    assert [check.name for check in found] == ["prefill aa000000/0 → decode bb000000/0"]


def test_a_fleet_without_a_hand_off_needs_no_pair() -> None:
    found = instance_checks.instance_checks([instance(Role.UNIFIED, "dd", transports=[])], {})
    assert [c.state for c in found] == ["ok"]


def test_an_instance_that_drains_is_not_one_that_is_missing_a_rank() -> None:
    leaving = instance(Role.DECODE, "bb", draining=True)
    found = instance_checks.instance_checks([PREFILL, DECODE, leaving], {})
    assert [c.state for c in found] == ["ok", "ok", "ok"]
    assert "draining" in found[2].found


def test_a_registry_is_asked_and_its_instances_are_tried() -> None:
    async def run() -> list[Check]:
        secret = b"s" * 16
        server = await serve("127.0.0.1", 0, secret=secret, limits=Limits())
        client = RegistryClient(server.url, secret=secret, limits=Limits())
        try:
            with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                for record, port in ((PREFILL, there.getsockname()[1]), (DECODE, nobody.getsockname()[1])):
                    at = msgspec.structs.replace(record.replicas[0], host="127.0.0.1", port=port)
                    await client.register(msgspec.structs.replace(record, replicas=[at]))
                return await asyncio.to_thread(instance_checks.look, server.url, secret, None)
        finally:
            await client.aclose()
            await server.close()

    found = {check.name: check for check in asyncio.run(run())}
    assert "knows 2 instances" in found["registry"].found
    assert found["prefill aa000000"].state == "ok"
    assert "segue 1.2, shm tcp" in found["prefill aa000000"].found
    assert found["decode bb000000"].state == "wrong"
    assert "refused" in found["decode bb000000"].found
    assert found["prefill aa000000/0 → decode bb000000/0"].state == "ok"


def test_a_registry_that_does_not_answer_is_wrong() -> None:
    (check,) = instance_checks.look("http://127.0.0.1:1", None, None)
    assert (check.name, check.state) == ("registry", "wrong")
    assert check.mend


# ---- the command -----------------------------------------------------------------------------------


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = Speed(transport="x", page_us=1, gb_per_s=10, memory_gb_per_s=10)
    monkeypatch.setattr(doctor, "measure", lambda name: msgspec.structs.replace(speed, transport=name))


@pytest.mark.usefixtures("unmeasured")
def test_the_report_is_a_table_and_json_in_a_file_or_on_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    assert main(["doctor", "--json", str(file), "--cache", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "what to do" in table
    assert "loopback" in table
    assert main(["doctor", "--cache", str(tmp_path), "--json"]) == 0
    printed = msgspec.json.decode(capsys.readouterr().out, type=doctor.Report)
    written = msgspec.json.decode(file.read_bytes(), type=doctor.Report)
    assert [c.name for c in printed.checks] == [c.name for c in written.checks]
    assert {row.name for row in written.transports} == set(KINDS.known)
    usable = {row.name: row.usable for row in written.transports}
    assert (usable["shm"], usable["tcp"]) == (True, True)


def test_text_of_others_is_printed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "pip install 'x[nixl]' [bold] :gear:"
    rows = [doctor.TransportRow(name="[red]t", usable=False, why_not=why)]
    report = doctor.Report(checks=[Check("[a] :key:", "wrong", why, f"mend {why}")], transports=rows)
    monkeypatch.setattr(doctor, "examine", lambda _config: report)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert printed.count(why) == 3
    assert "[a] :key:" in printed
    assert "[red]t" in printed


@pytest.mark.usefixtures("unmeasured")
def test_the_status_is_1_if_something_is_wrong_and_2_for_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(host_checks, "checks", lambda _cache: [Check("loopback", "wrong", "no")])
    assert main(["doctor"]) == 1
    monkeypatch.setattr(host_checks, "checks", lambda _cache: [Check("open files", "warn", "3")])
    assert main(["doctor"]) == 0, "a warning is no fault"
    assert main(["doctor", "--secret-file", str(tmp_path / "none")]) == 2
    assert main(["doctor", "--json", str(tmp_path / "no" / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.usefixtures("unmeasured")
def test_what_the_registry_shows_is_part_of_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[object, ...]] = []
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef\n")

    def look(*arguments: object) -> list[Check]:
        asked.append(arguments)
        return [Check("registry", "wrong", "away", "start it")]

    monkeypatch.setattr(instance_checks, "look", look)
    assert main(["doctor", "--registry", "http://127.0.0.1:9", "--secret-file", str(secret)]) == 1
    assert asked == [("http://127.0.0.1:9", b"0123456789abcdef", None)]
