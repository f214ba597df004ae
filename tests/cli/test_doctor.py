"""`segue doctor`: each check in its bad case, the measurement, the registry, and what is printed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from segue.cli.doctor import doctor_command as doctor
from segue.cli.doctor import host_checks, host_facts, instance_checks
from segue.cli.doctor.host_checks import Check
from segue.cli.doctor.host_facts import CacheFolder, HostFacts, ListeningSocket
from segue.cli.main import main
from segue.engine.cpu.processor import processor_of
from segue.kv.ids import Incarnation, Role
from segue.kv.layout.blocks import CopyBlock
from segue.kv.limits import Limits
from segue.kv.transport.kinds import KINDS, USABLE
from segue.kv.transport.memory.host_memory import GroupMemory
from segue.kv.transport.probe import FAR_UNDER, Measurement
from segue.lab.bench import transport_probe
from segue.lab.bench.transport_probe import Speed
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.registry.registry_server import serve

GOOD = HostFacts(
    python=(3, 11, 7),
    system="Linux",
    kernel="6.18.0",
    machine="x86_64",
    processor=processor_of("flags\t: fpu avx2 avx512f amx_bf16 avx512_bf16\n", {}),
    cores=2,
    free_bytes=8 * 2**30,
    memory_limit_bytes=None,
    packages=dict.fromkeys(host_facts.ENGINE_PACKAGES, "1.0"),
    drivers={},
    rdma_ports={},
    memfd="",
    seals="",
    populate="",
    pidfd="",
    loopback="",
    dev_shm_free_bytes=2**30,
    memlock_bytes=8 * 2**20,
    open_files=65536,
    ports={8000: "", 8998: ""},
    clock_source="tsc",
    clock_synchronised=True,
    environment={},
    mooncake_listeners=(),
    transports={"shm": USABLE, "tcp": USABLE},
    automatic=("shm", "tcp"),
    cache=CacheFolder("/cache", True, 2**40),
)
CARD = {"mlx5_0/1": "4: ACTIVE"}
NIXL = {**GOOD.packages, "nixl-cu12": "1.5.1"}


def test_a_good_host_has_nothing_to_mend() -> None:
    found = host_checks.checks(GOOD)
    assert [c for c in found if c.state != "ok" or c.mend] == []
    assert len({c.name for c in found}) == len(found) == len(host_checks.CHECKS)
    assert not host_checks.wrong(found)


BAD: list[tuple[dict[str, object], str, str, str, str]] = [
    # what is different, name, state, in what was found, in what to do
    ({"python": (3, 10, 1)}, "python", "wrong", "3.10.1", "3.11"),
    ({"system": "Darwin"}, "kernel", "wrong", "Darwin", "Linux"),
    (
        {"processor": processor_of("flags\t: fpu avx2\n", {})},
        "cpu",
        "warn",
        "--dtype auto is float32: this processor does not multiply bfloat16 (avx2)",
        "--dtype float32",
    ),
    ({"processor": processor_of("", {})}, "cpu", "warn", "no vector instructions", "float32"),
    ({"free_bytes": 2**30, "memory_limit_bytes": 2**31}, "memory", "warn", "have 2.0 GiB", "--kv-gib"),
    ({"open_files": 256}, "open files", "warn", "256", "ulimit -n 1024"),
    ({"memfd": "Not permitted"}, "shared memory", "wrong", "memfd_create: Not permitted", "seccomp"),
    ({"seals": "Not permitted"}, "shared memory", "wrong", "seals", "seccomp"),
    ({"pidfd": "Not permitted"}, "shared memory", "warn", "pidfd_open: Not permitted", "seccomp"),
    ({"populate": "Invalid argument"}, "MADV_POPULATE_WRITE", "warn", "page by page", "5.14"),
    ({"dev_shm_free_bytes": 2**20, "packages": NIXL}, "/dev/shm", "warn", "1 MiB", "--shm-size"),
    ({"dev_shm_free_bytes": None, "packages": NIXL}, "/dev/shm", "warn", "not there", "--shm-size"),
    ({"rdma_ports": CARD}, "locked memory", "warn", "8 MiB", "ulimit -l unlimited"),
    ({"loopback": "Unreachable"}, "loopback", "wrong", "Unreachable", "ip link"),
    ({"ports": {8000: "In use", 8998: ""}}, "ports", "warn", "8000: In use", "--port"),
    ({"ports": {8000: "", 8998: "In use"}}, "ports", "warn", "8998: In use", "--bootstrap-port"),
    ({"clock_source": "hpet"}, "clocks", "warn", "slow to read", "tsc"),
    ({"clock_synchronised": False}, "clocks", "warn", "not synchronised", "chrony"),
    ({"drivers": {"nvidia": "570.1"}}, "accelerators", "warn", "nvidia driver 570.1", "cuda-bindings"),
    ({"drivers": {"amd": "6.1"}}, "accelerators", "warn", "amd driver", "amd-mori"),
    ({"drivers": {"ascend": "25"}}, "accelerators", "warn", "ascend driver", "memfabric-hybrid"),
    (
        {"drivers": {"nvidia": "570"}, "packages": {**GOOD.packages, "torch": "2.13.0+cpu"}},
        "torch build",
        "warn",
        "2.13.0+cpu beside an NVIDIA driver",
        "CUDA build",
    ),
    ({"rdma_ports": {"mlx5_0/1": "1: DOWN"}}, "rdma", "warn", "mlx5_0/1 1: DOWN", "bring the port up"),
    ({"packages": {}}, "torch", "wrong", "not installed", "segue[engine]"),
    (
        {
            "packages": {
                **GOOD.packages,
                "mooncake-transfer-engine": "1",
                "mooncake-transfer-engine-non-cuda": "1",
            }
        },
        "transport libraries",
        "wrong",
        "overwrite",
        "uninstall",
    ),
    ({"rdma_ports": CARD, "environment": {"UCX_TLS": "tcp"}}, "ucx", "warn", "UCX_TLS=tcp", "unset"),
    ({"environment": {"MC_TCP_PROTO": "1"}}, "mooncake settings", "wrong", "before they have", "unset"),
    (
        {"rdma_ports": CARD, "environment": {"MC_FORCE_TCP": "1"}},
        "mooncake settings",
        "warn",
        "not used",
        "unset",
    ),
    (
        {"mooncake_listeners": (ListeningSocket(7, "python", 15003),)},
        "mooncake listeners",
        "warn",
        "port 15003 (python 7)",
        "firewall",
    ),
    (
        {"transports": {"shm": "forbidden here", "tcp": USABLE}},
        "--transport auto",
        "warn",
        "shm does not work: forbidden here; it takes tcp",
        "shared memory",
    ),
    ({"transports": {"shm": "no", "tcp": "no"}}, "--transport auto", "wrong", "tcp does not", "loopback"),
    ({"cache": CacheFolder("/c", False, 2**40)}, "model cache", "wrong", "/c cannot", "--cache"),
    ({"cache": CacheFolder("/c", True, 2**20)}, "model cache", "warn", "0.0 GiB", "--cache"),
]


@pytest.mark.parametrize(("change", "name", "state", "found", "mend"), BAD)
def test_what_is_bad_is_said_with_what_to_do(
    change: dict[str, object], name: str, state: str, found: str, mend: str
) -> None:
    facts = replace(GOOD, **change)  # type: ignore[arg-type]
    (check,) = [c for c in host_checks.checks(facts) if c.name == name]
    assert (check.state, found in check.found, mend in check.mend) == (state, True, True), check
    assert host_checks.wrong([check]) == (state == "wrong")


GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("name", "fine", "bad"),
    [
        ("python", {"python": (3, 11, 0)}, {"python": (3, 10, 99)}),
        ("memory", {"free_bytes": 3 * GIB}, {"free_bytes": 3 * GIB - 1}),
        ("open files", {"open_files": 1024}, {"open_files": 1023}),
        (
            "/dev/shm",
            {"dev_shm_free_bytes": 64 * MIB, "packages": NIXL},
            {"dev_shm_free_bytes": 64 * MIB - 1, "packages": NIXL},
        ),
        ("/dev/shm", {"dev_shm_free_bytes": None}, {"dev_shm_free_bytes": None, "packages": NIXL}),
        (
            "locked memory",
            {"rdma_ports": CARD, "memlock_bytes": -1},
            {"rdma_ports": CARD, "memlock_bytes": 1},
        ),
        ("clocks", {"clock_synchronised": None}, {"clock_synchronised": False}),
        ("rdma", {"rdma_ports": CARD}, {"rdma_ports": CARD | {"mlx5_1/1": "1: DOWN"}}),
        (
            "torch build",
            {"drivers": {}, "packages": {"torch": "2+cpu"}},
            {"drivers": {"nvidia": "1"}, "packages": {"torch": "2+cpu"}},
        ),
        (
            "ucx",
            {"rdma_ports": CARD, "environment": {"UCX_TLS": "tcp,rc"}},
            {"rdma_ports": CARD, "environment": {"UCX_TLS": "tcp"}},
        ),
        ("ucx", {"environment": {"UCX_TLS": "tcp"}}, {"rdma_ports": CARD, "environment": {"UCX_TLS": "tcp"}}),
        ("mooncake settings", {"environment": {"MC_TCP_PROTO": "0"}}, {"environment": {"MC_TCP_PROTO": "1"}}),
        (
            "mooncake settings",
            {"environment": {"MC_FORCE_TCP": "1"}},
            {"rdma_ports": CARD, "environment": {"MC_FORCE_TCP": "1"}},
        ),
        (
            "model cache",
            {"cache": CacheFolder("/c", True, 2 * GIB)},
            {"cache": CacheFolder("/c", True, 2 * GIB - 1)},
        ),
    ],
)
def test_each_bound_is_where_it_is(name: str, fine: dict[str, object], bad: dict[str, object]) -> None:
    states = []
    for change in (fine, bad):
        (check,) = [c for c in host_checks.checks(replace(GOOD, **change)) if c.name == name]  # type: ignore[arg-type]
        states.append(check.state)
    assert states[0] == "ok"
    assert states[1] != "ok"


def test_each_check_has_a_bad_case_here() -> None:
    engine = set(host_facts.ENGINE_PACKAGES) - {"torch"}  # one function makes these
    assert {c.name for c in host_checks.checks(GOOD)} - {bad[1] for bad in BAD} == engine


def test_the_facts_of_this_host_are_those_that_its_transports_rely_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = host_facts.gather(str(tmp_path / "none"))
    assert (facts.memfd, facts.seals, facts.pidfd, facts.loopback) == ("", "", "", "")
    assert facts.transports["shm"] == USABLE
    assert facts.cache.writable

    def forbidden(*_args: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(host_facts.os, "pidfd_open", forbidden)
    facts = host_facts.gather(str(tmp_path))
    assert facts.pidfd == "Operation not permitted"
    assert "not permitted" in facts.transports["shm"]


def test_the_limit_of_memory_is_the_least_of_the_groups_of_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for groups, least in (([], None), ([GroupMemory(3 * MIB, 0), GroupMemory(2 * MIB, MIB)], 2 * MIB)):
        monkeypatch.setattr(host_facts, "limited_groups", lambda groups=groups: groups)
        assert host_facts.gather(str(tmp_path)).memory_limit_bytes == least


def test_a_listener_of_a_process_with_mooncake_in_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read, mapped = host_facts._read, ""

    def ours() -> list[int]:
        return [s.port for s in host_facts._mooncake_listeners() if s.pid == os.getpid()]

    monkeypatch.setattr(
        host_facts, "_read", lambda path: mapped if str(path).endswith("/maps") else read(path)
    )
    with socket.create_server(("0.0.0.0", 0)) as server, socket.create_server(("127.0.0.1", 0)):
        assert ours() == []
        mapped = "/x/mooncake/engine.so"
        assert ours() == [server.getsockname()[1]], "the one on loopback harms nobody"


# ---- transports ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_transport_is_measured_between_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_probe, "LIMIT_S", 240.0)
    speed = transport_probe.measure("shm")
    assert isinstance(speed, Speed), speed
    assert (speed.transport, speed.page_us > 0, speed.gb_per_s > 0) == ("shm", True, True)


def test_a_measurement_that_fails_says_why() -> None:
    assert "unknown transport 'none'" in str(transport_probe.measure("none"))


def test_a_measurement_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def hanging(_command: list[str], **arguments: Any) -> subprocess.Popen[bytes]:
        assert arguments["start_new_session"], "so that its reader is ended, too"
        started.append(real([sys.executable, "-c", "import signal; signal.pause()"], **arguments))
        return started[0]

    monkeypatch.setattr(transport_probe.subprocess, "Popen", hanging)
    monkeypatch.setattr(transport_probe, "LIMIT_S", 0.2)
    assert transport_probe.measure("shm") == "it did not end within 0.2 s"
    assert started[0].returncode == -9


def test_a_slow_transport_is_measured_within_the_time_that_there_is() -> None:
    """It moves bytes, so to say that it moved nothing would be wrong."""
    byte_s = 1 / 200e3  # 200 KB a second: 32 MiB would take three minutes
    measurement = Measurement(
        lambda pages: [CopyBlock(0, 0, 1, pages * transport_probe.PAGE_BYTES)], transport_probe.EFFORT
    )
    taken_s = 0.0
    while (figures := measurement.figures) is None:
        write_s = sum(block.nbytes for block in measurement.write) * byte_s
        measurement.took(write_s)
        taken_s += write_s
    assert taken_s < transport_probe.LIMIT_S / 2
    assert figures.bytes_per_s == pytest.approx(1 / byte_s)


def test_what_is_far_slower_than_memory_is_a_warning() -> None:
    slow = Speed(transport="nixl", page_us=90, gb_per_s=0.1, memory_gb_per_s=10)
    assert doctor.speed_check(slow).state == "warn"
    assert doctor.speed_check(msgspec.structs.replace(slow, gb_per_s=1.0)).state == "ok"
    bound = msgspec.structs.replace(slow, gb_per_s=10 / FAR_UNDER)
    assert doctor.speed_check(bound).state == "ok"
    assert doctor.speed_check(msgspec.structs.replace(bound, gb_per_s=0.99 * bound.gb_per_s)).state == "warn"


def test_what_is_usable_and_moves_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_probe, "measure", lambda _name: "the library ended its process")
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
    monkeypatch.setattr(
        transport_probe, "measure", lambda name: msgspec.structs.replace(speed, transport=name)
    )


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
    monkeypatch.setattr(host_facts, "gather", lambda _cache: replace(GOOD, loopback="no"))
    assert main(["doctor"]) == 1
    monkeypatch.setattr(host_facts, "gather", lambda _cache: replace(GOOD, open_files=3))
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
