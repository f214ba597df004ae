"""A plug-in of vLLM, found by PYTHONPATH: tensor-parallel ranks on CPUs wait for each other in torch's gloo,
which sleeps, instead of in vLLM's shared memory, where a rank spins. On two cores the ranks that spin take
them from the ranks that compute."""

from __future__ import annotations


def register() -> None:
    """Called in each of vLLM's processes before it makes its groups."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
