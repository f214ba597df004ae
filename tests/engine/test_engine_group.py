"""The carrier of a tensor between ranks: Gloo from the CPU, NCCL from a GPU. NCCL itself was never run:
here is a double of it, made and called as torch's own stubs say. Tensors without a place stand for those
of a GPU."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import HashStore

from segue.engine.ranks import collectives as group
from segue.engine.ranks.collectives import STAGE_S, TensorGroup
from segue.kv.errors import ConfigError, PeerLost


class DoubleNCCL:
    """The arguments and calls of the group."""

    Options = SimpleNamespace
    made: ClassVar[list[DoubleNCCL]] = []
    fails = ""

    def __init__(self, store: object, rank: int, size: int, options: SimpleNamespace) -> None:
        self.asked: list[tuple[str, Any]] = [(f"rank {rank} of {size}", options._timeout)]
        self.made.append(self)

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> SimpleNamespace:
            return SimpleNamespace(wait=lambda limit: self._waited(name, limit))

        return call

    def _waited(self, name: str, limit: timedelta) -> None:
        if self.fails:
            raise torch.distributed.DistBackendError(self.fails)
        self.asked.append((name, limit))

    def abort(self) -> None:
        self.asked.append(("abort", None))


@pytest.fixture
def alone() -> TensorGroup:
    return TensorGroup(HashStore(), "tp", 0, 1, timeout_s=20)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[DoubleNCCL]:
    monkeypatch.setattr(group, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", DoubleNCCL, raising=False)
    monkeypatch.setattr(DoubleNCCL, "made", [])
    return DoubleNCCL.made


def test_tensors_of_the_cpu_go_over_gloo_and_those_of_a_gpu_over_nccl(
    alone: TensorGroup, nccl: list[DoubleNCCL]
) -> None:
    rows = torch.ones(2, 3)
    assert alone.sum(rows).tolist() == alone.gather(rows, [2])[0].tolist() == [[1.0] * 3] * 2
    assert nccl == []
    there = torch.empty(2, 3, device="meta")
    assert alone.sum(there) is there
    assert alone.gather(there, [2])[0].shape == (2, 3)
    alone.send(there, 0)
    assert alone.receive(there, 0) is there
    alone.close()
    [made] = nccl
    own, stage = timedelta(seconds=20), timedelta(seconds=STAGE_S)
    assert made.asked == [
        ("rank 0 of 1", own),
        ("allreduce", own),
        ("allgather", own),
        ("send", stage),
        ("recv", stage),
        ("abort", None),
    ]


def test_an_error_of_nccl_is_the_loss_of_a_rank(
    alone: TensorGroup, nccl: list[DoubleNCCL], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DoubleNCCL, "fails", "remote process exited")
    with pytest.raises(PeerLost, match=r"a sum of 1 ranks \(tp\) failed: remote process exited"):
        alone.sum(torch.empty(1, device="meta"))


def test_without_nccl_tensors_of_a_gpu_are_refused_with_what_to_do(alone: TensorGroup) -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this build of torch has NCCL")
    with pytest.raises(ConfigError, match="install one with CUDA, or give"):
        alone.sum(torch.empty(1, device="meta"))


def test_torch_makes_a_group_of_nccl_of_what_it_is_given() -> None:
    stubs = ast.parse((Path(torch.__file__).parent / "_C/_distributed_c10d.pyi").read_text())
    [nccl] = [n for n in stubs.body if isinstance(n, ast.ClassDef) and n.name == "ProcessGroupNCCL"]
    methods = {n.name: n for n in nccl.body if isinstance(n, ast.FunctionDef)}
    assert [a.arg for a in methods["__init__"].args.args] == ["self", "store", "rank", "size", "options"]
    assert "abort" in methods
    assert "Options" in [n.name for n in nccl.body if isinstance(n, ast.ClassDef)]
