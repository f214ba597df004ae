"""The DP ranks of one instance: one incarnation, and a process for each leader.

A rank that dies takes its own requests with it, and they fail at once where its sessions end. The others
share nothing with it but the incarnation: they go on, and the registry shows the instance without it. Nothing
is restarted here: the instance ends with a status but 0, and whoever keeps it can start it again as a whole.
`segue serve` does: the other ranks finish what they have, then all start in a new incarnation.

Ranks that share out a model's experts (`engine.ranks.dp_group`) cannot go on: each hears of the end of
another over the sockets that they get from here, ends its requests with an error and leaves.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from segue.kv import Role, new_incarnation
from segue.server.frontend.keys import read_keys
from segue.server.settings.commands import FrontendConfig, InstanceConfig
from segue.server.supervisor.children import Child, ChildSpec
from segue.server.supervisor.process_tree import ProcessTree, ServeResult, Unit, secret_fd

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
    links = star(instance.dp) if instance.enable_expert_parallel else [[]] * instance.dp
    specs = []
    for rank, sockets in enumerate(links):
        leader = instance.leader(incarnation, rank)
        if sockets:
            leader = replace(leader, dp_fds=",".join(str(s.fileno()) for s in sockets))
        spec = tree.spec(f"{instance.label}.dp{rank}", role, command(role, leader), threads, fds)
        specs.append(replace(spec, sockets=sockets))
    return specs


def star(size: int) -> list[list[socket.socket]]:
    """Links between `size` ranks: rank 0 has one to every other, and those have one to it."""
    pairs = [socket.socketpair() for _ in range(1, size)]
    return [[ours for ours, _ in pairs], *([theirs] for _, theirs in pairs)]


class RankProcesses(ProcessTree):
    """`segue prefill|decode|unified --dp N`: the leaders of one instance. `instance` names a registry that
    answers, and the memory and threads of one rank; `announce` gets their addresses once all are ready."""

    def __init__(
        self, instance: InstanceConfig, command: Command, announce: Callable[[str], None], **options: object
    ) -> None:
        super().__init__(instance.limit.drain_s, **options)  # type: ignore[arg-type]
        self._instance = instance
        self.command = command
        self._announce = announce

    async def run(self) -> ServeResult:
        """Serve until a signal, or until no rank is left."""
        try:
            keys = "\n".join(read_keys(self._instance.access)).encode()
            secret = self._instance.secret
            with self.signals(), secret_fd(secret) as fd, secret_fd(keys) as keys_fd:
                instance = self._instance
                if secret:
                    instance = replace(instance, secret_file=f"/proc/self/fd/{fd}")
                if keys:
                    access = instance.access
                    access = replace(access, api_key=None, api_key_file=f"/proc/self/fd/{keys_fd}")
                    instance = replace(instance, access=access)
                make = partial(leaders, self, instance, self.command, (fd, keys_fd))
                unit = Unit(instance.label, instance.role, lambda _: make())
                return await self.keep([unit])
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
