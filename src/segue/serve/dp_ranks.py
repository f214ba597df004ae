"""The DP ranks of one instance: one incarnation, and a process for each leader.

A rank that dies takes its own requests with it, and they fail at once where its sessions end. The others
share nothing with it but the incarnation: they go on, and the registry shows the instance without it. Nothing
is restarted, so the instance ends with a status but 0, and whoever keeps it can start it anew as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from segue.core.config import FrontendConfig, InstanceConfig
from segue.core.types import Role, new_incarnation
from segue.serve.children import Child, ChildSpec
from segue.serve.process_tree import ProcessTree, ServeResult, lifeline, secret_fd

#: Makes the command of a child: its role and its configuration in, words out.
Command = Callable[[Role, InstanceConfig | FrontendConfig], Sequence[str]]


def leaders(
    tree: ProcessTree, instance: InstanceConfig, command: Command, fds: tuple[int, ...]
) -> list[ChildSpec]:
    """The children of one instance: one for each DP rank, all of one incarnation. Memory and threads in
    `instance` are those of one rank."""
    role, threads = instance.role, instance.engine.threads_per_worker or 1
    if instance.dp == 1:
        return [tree.spec(instance.label, role, command(role, instance), threads, fds)]
    incarnation = new_incarnation()
    made = [instance.leader(incarnation, rank) for rank in range(instance.dp)]
    return [
        tree.spec(f"{instance.label}.dp{rank}", role, command(role, leader), threads, fds)
        for rank, leader in enumerate(made)
    ]


class RankProcesses(ProcessTree):
    """`segue prefill|decode|unified --dp N`: the leaders of one instance. `instance` names a registry that
    answers, and the memory and threads of one rank; `announce` gets their addresses once all are ready."""

    def __init__(
        self, instance: InstanceConfig, command: Command, announce: Callable[[str], None], **options: object
    ) -> None:
        super().__init__(instance.limit.drain_s, **options)  # type: ignore[arg-type]
        self._instance = instance
        self._command = command
        self._announce = announce

    async def run(self) -> ServeResult:
        """Serve until a signal, or until no rank is left."""
        try:
            with secret_fd(self._instance.secret) as fd, lifeline() as lifeline_fd:
                async with self.signals():
                    instance = self._instance
                    if instance.secret:
                        instance = dataclasses.replace(instance, secret_file=f"/proc/self/fd/{fd}")
                    return await self.keep(leaders(self, instance, self._command, (fd,)), lifeline_fd)
        finally:
            self._console.close()

    def ready(self, urls: Sequence[tuple[Role, str]]) -> None:
        """See `ProcessTree.ready`."""
        self._announce(",".join(url for _, url in urls))

    def ended(self, died: Sequence[Child], *, clean: bool) -> ServeResult:
        """See `ProcessTree.ended`; an instance that has lost a rank did not end well."""
        if died:
            names = ", ".join(f"{c.name} ({c.exit_text()})" for c in died)
            return ServeResult(1, f"not all ranks were there at the end: {names}")
        return super().ended(died, clean=clean)
