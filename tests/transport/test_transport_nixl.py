"""What `nixl` tells UCX, and what it takes from NIXL; the bytes are in `tests/conformance`."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.transport import nixl
from segue.transport.memory import Memory, Region


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


def test_every_name_of_nixl_that_is_used_exists() -> None:
    """It is a private module, whose public class would let a thread spin."""
    pytest.importorskip("nixl_cu12")
    bindings = nixl.bindings()
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
