"""The variables that `nixl` sets for UCX, and its use of NIXL; the bytes are in `tests/kv/conformance`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from segue.kv.errors import TransferFailed
from segue.kv.transport import nixl
from segue.kv.transport.memory.pool_memory import Memory, Region
from segue.kv.transport.tcp.tcp_wire import PartRows


def test_ucx_is_told_what_the_user_has_not_set(tmp_path: Path) -> None:
    told = nixl.missing({}, "127.0.0.1", tmp_path)
    assert told["UCX_TLS"].split(",")[0] == "tcp"
    assert told["UCX_NET_DEVICES"] == "lo"
    assert told["UCX_LOG_FILE"] == "stderr", "what runs segue reads its standard output"
    assert "UCX_NET_DEVICES" not in nixl.missing({}, "0.0.0.0", tmp_path)
    set_by_user = {"UCX_TLS": "all", "UCX_NET_DEVICES": "eth0", "UCX_MODULES": "all", "UCX_LOG_FILE": "x"}
    assert nixl.missing(set_by_user, "127.0.0.1", tmp_path) == {}


def test_with_infiniband_ucx_chooses_by_itself(tmp_path: Path) -> None:
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert nixl.missing({}, "127.0.0.1", tmp_path) == {"UCX_LOG_FILE": "stderr"}


#: What `nixl/__init__.py` of 1.5 does once it has chosen: its modules are those of the build.
META = "import sys, nixl_cu12._bindings as chosen\nsys.modules['nixl._bindings'] = chosen\n"
BROKEN_META = "raise ImportError('detected CUDA 13 but nixl-cu13 is not installed')\n"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[dict[str, str]], None]]:
    """Installs packages, each with this text, and these alone. `torch` has its text in `version.py`."""

    def loaded() -> list[str]:
        packages = ("nixl", "nixl_cu12", "nixl_cu13", "torch")
        return [name for name in sys.modules if name.partition(".")[0] in packages]

    def install(packages: dict[str, str]) -> None:
        for package, text in packages.items():
            torch = package == "torch"
            folder = tmp_path / package
            folder.mkdir()
            (folder / "__init__.py").write_text("raise ImportError('slow')" if torch else text)
            (folder / ("version.py" if torch else "_bindings.py")).write_text(text if torch else "")

    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    standard = [path for path in sys.path if "-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *standard])
    yield install
    for name in loaded():
        del sys.modules[name]


BOTH = {"nixl_cu12": "", "nixl_cu13": ""}


@pytest.mark.parametrize(
    ("packages", "chosen"),
    [
        (BOTH | {"nixl": META, "torch": "cuda = '13.0'"}, "nixl_cu12"),
        (BOTH | {"torch": "cuda = '13.0'"}, "nixl_cu13"),
        (BOTH | {"torch": "cuda: str | None = '12.8'"}, "nixl_cu12"),
        (BOTH | {"torch": "cuda = None"}, "nixl_cu13"),
        (BOTH | {"torch": ""}, "nixl_cu13"),
        ({"nixl_cu12": "", "torch": "cuda = '13.0'"}, "nixl_cu12"),
    ],
)
def test_the_build_is_the_choice_of_nixls_own_package_or_that_for_the_cuda_of_torch(
    install: Callable[[dict[str, str]], None], packages: dict[str, str], chosen: str
) -> None:
    install(packages)
    assert nixl.bindings().__name__ == f"{chosen}._bindings"


@pytest.mark.parametrize("there", [(), ("torch/__init__.py",), ("torch/other.py",)])
def test_torch_without_its_version_is_no_reason_to_fail(
    install: Callable[[dict[str, str]], None], tmp_path: Path, there: tuple[str, ...]
) -> None:
    for name in there:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    install(BOTH)
    assert nixl.bindings().__name__ == "nixl_cu13._bindings"


@pytest.mark.parametrize(
    ("packages", "why"),
    [
        ({}, "NIXL is not installed"),
        ({"nixl": BROKEN_META, "nixl_cu12": ""}, "detected CUDA 13 but nixl-cu13 is not installed"),
    ],
)
def test_without_a_build_the_reason_says_what_to_install(
    install: Callable[[dict[str, str]], None], packages: dict[str, str], why: str
) -> None:
    install(packages)
    assert nixl.NixlTransport.unusable() == f"{why}; pip install 'segue[nixl]'"


def test_every_name_of_nixl_that_is_used_exists() -> None:
    """It is a private module, whose public class would let a thread spin."""
    try:
        bindings = nixl.bindings()
    except ImportError as why:
        pytest.skip(str(why))
    for name in (
        "DRAM_SEG",
        "VRAM_SEG",
        "NIXL_IN_PROG",
        "NIXL_SUCCESS",
        "NIXL_WRITE",
        "nixlAgentConfig.pthrDelay",
        "nixlAgentConfig.useProgThread",
        "nixlAgent.createBackend",
        "nixlAgent.createXferReq",
        "nixlAgent.getLocalMD",
        "nixlAgent.getXferStatus",
        "nixlAgent.loadRemoteMD",
        "nixlAgent.makeConnection",
        "nixlAgent.postXferReq",
        "nixlAgent.registerMem",
        "nixlAgent.releaseXferReq",
        "nixlRegDList",
        "nixlXferDList",
    ):
        found = bindings
        for part in name.split("."):
            found = getattr(found, part)


class Agent:
    """An agent that does nothing; its class is the module as well."""

    DRAM_SEG, VRAM_SEG = "DRAM", "VRAM"

    def __init__(self, *_: object) -> None:
        self.createBackend = self.registerMem = lambda *_: None

    def getLocalMD(self) -> bytes:
        return b""


Agent.nixlAgent = Agent.nixlAgentConfig = Agent.nixlRegDList = Agent  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tls", "device", "proof"),
    [
        ("tcp", "cpu", True),
        ("tcp,cuda_copy", "cpu", True),
        ("tcp,rc", "cpu", False),
        ("rc", "cpu", False),
        ("all", "cpu", False),
        ("", "cpu", False),
        ("tcp,cuda_copy", "cuda:0", False),
    ],
)
def test_the_end_of_an_agent_is_a_proof_only_where_its_own_thread_does_all_the_copying(
    tls: str, device: str, proof: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    end = nixl.NixlReceivingEnd(Agent, Memory([Region(4096, 4096, device)]))  # type: ignore[arg-type]
    assert end.close() is proof


class Recorded:
    """NIXL as far as it is used: what it was told, and `status`, which it gives of each write."""

    DRAM_SEG, VRAM_SEG, NIXL_WRITE = "DRAM", "VRAM", "WRITE"
    NIXL_SUCCESS, NIXL_IN_PROG, NIXL_ERR_BACKEND = 0, 1, -1

    def __init__(self) -> None:
        self.nixlAgentConfig = SimpleNamespace
        self.nixlRegDList = self.nixlXferDList = lambda kind, rows: (kind, np.array(rows, object).tolist())
        self.nixlAgent = self.agent
        self.agents: list[SimpleNamespace] = []
        self.registered: list[object] = []
        self.writes: list[tuple[object, ...]] = []
        self.released: list[object] = []
        self.status = self.NIXL_IN_PROG

    def agent(self, _name: str, config: SimpleNamespace) -> SimpleNamespace:
        self.agents.append(config)
        return SimpleNamespace(
            createBackend=lambda *_: None,
            registerMem=lambda found, _: self.registered.append(found),
            getLocalMD=lambda: b"blob",
            loadRemoteMD=lambda _: b"peer",
            makeConnection=lambda *_: None,
            createXferReq=lambda *how: self.writes.append(how) or len(self.writes),
            postXferReq=lambda *_: self.status,
            getXferStatus=lambda _: self.status,
            releaseXferReq=self.released.append,
        )


def regions(*devices: str) -> Memory:
    return Memory([Region(4096 * (n + 1), 1000, device) for n, device in enumerate(devices)])


def writing(made: Recorded, device: str = "cpu") -> nixl.NixlWritingEnd:
    return nixl.NixlWritingEnd(made, regions(device), regions("cuda:3"), b"blob")  # type: ignore[arg-type]


def row() -> PartRows:
    return PartRows(np.array([[7, 10]], np.uint64), np.array([[20, 10]], np.uint64), 10)


@pytest.mark.parametrize(
    ("device", "kind", "number"), [("cpu", "DRAM", 0), ("cuda:1", "VRAM", 1), ("cuda", "VRAM", 0)]
)
def test_memory_is_registered_and_written_with_its_kind_and_the_number_of_its_device(
    device: str, kind: str, number: int
) -> None:
    made = Recorded()
    end = writing(made, device)
    assert made.registered == [(kind, [[4096, 1000, number, b""]])]
    end.post(row())
    (told,) = made.writes
    assert told[:4] == ("WRITE", (kind, [[4103, 10, number]]), ("VRAM", [[4116, 10, 3]]), "peer")


def test_memory_of_several_devices_is_refused() -> None:
    for devices in (("cpu", "cuda:0"), ("cuda:0", "cuda:1")):
        with pytest.raises(TransferFailed, match="one device at a time") as caught:
            nixl.NixlReceivingEnd(Recorded(), regions(*devices))  # type: ignore[arg-type]
        assert not caught.value.info.retryable


def test_who_receives_has_a_thread_and_who_writes_moves_on_by_itself() -> None:
    made = Recorded()
    nixl.NixlReceivingEnd(made, regions("cpu"))  # type: ignore[arg-type]
    writing(made)
    assert [agent.useProgThread for agent in made.agents] == [True, False]
    assert {agent.pthrDelay for agent in made.agents} == {nixl.LOOK_US}


def test_a_write_is_done_when_nixl_says_success_and_its_handle_is_given_back_then() -> None:
    made = Recorded()
    end = writing(made)
    first, second = end.post(row()), end.post(row())
    assert not end.done(first)
    assert made.released == []
    made.status = made.NIXL_SUCCESS
    assert end.done(second)
    assert end.done(first)
    assert made.released == [second, first]


def test_whatever_else_nixl_says_is_a_failure_when_it_is_posted_and_later() -> None:
    made = Recorded()
    end = writing(made)
    handle = end.post(row())
    made.status = made.NIXL_ERR_BACKEND
    with pytest.raises(TransferFailed, match="-1 of a write"):
        end.done(handle)
    with pytest.raises(TransferFailed, match="-1 of a write"):
        end.post(row())
    assert made.released == []


def test_an_agent_that_somebody_else_holds_lives_on_and_may_read_or_let_somebody_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    for make in (writing, lambda made: nixl.NixlReceivingEnd(made, regions("cpu"))):
        end = make(Recorded())
        kept = end._agent
        assert not end.close()
        del kept
        assert make(Recorded()).close()
