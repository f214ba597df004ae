"""`--dp N`: the leaders of one instance as processes of one incarnation; processes that hold no model."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import supervised

from segue.engine.pool_size import Host
from segue.kv.errors import ConfigError
from segue.kv.ids import Role
from segue.server.settings.commands import FrontendConfig, InstanceConfig
from segue.server.settings.layers import argv
from segue.server.settings.ranks_config import RanksConfig
from segue.server.settings.shared_config import LimitsConfig
from segue.server.supervisor.children import Child
from segue.server.supervisor.console import Console
from segue.server.supervisor.dp_rank_processes import RankProcesses, leaders
from segue.server.supervisor.process_tree import ServeResult

#: All of them leave by themselves.
PATIENT = LimitsConfig(drain_s=60)


def run(
    journal: Path,
    announce: Callable[[RankProcesses, str], None] = lambda ranks, _: ranks.stop(),
    behaviours: Mapping[str, str] | None = None,
) -> ServeResult:
    made: list[RankProcesses] = []

    def command(role: Role, config: InstanceConfig | FrontendConfig) -> Sequence[str]:
        assert isinstance(config, InstanceConfig)
        name = f"{config.label}.dp{config.dp_rank}"
        return [sys.executable, str(supervised.FAKE), str(journal), name, (behaviours or {}).get(name, "ok")]

    async def main() -> ServeResult:
        config = InstanceConfig(model="m", registry="http://127.0.0.1:9", dp=3, limit=PATIENT)
        ranks = RankProcesses(
            config, command, lambda urls: announce(ranks, urls), console=Console(io.StringIO())
        )
        made.append(ranks)
        return await ranks.run()

    outcome = asyncio.run(main())
    assert not any(child.alive for child in made[0].children)
    return outcome


def left(journal: Path) -> list[str]:
    return sorted(re.findall(r"^(\S+) left$", journal.read_text(), re.MULTILINE))


ALL = ["prefill.dp0", "prefill.dp1", "prefill.dp2"]


def test_it_is_ready_when_all_ranks_are_and_drains_them_all(tmp_path: Path) -> None:
    said: list[str] = []

    def announce(ranks: RankProcesses, urls: str) -> None:
        said.append(urls)
        ranks.stop()

    assert run(tmp_path / "j", announce) == ServeResult(0)
    assert said == [",,"], "one address for each, and no model here that had one"
    assert left(tmp_path / "j") == ALL


def kill(ranks: RankProcesses, *which: int) -> None:
    for rank in which:
        os.kill(ranks.children[rank].process.pid, signal.SIGKILL)


def test_when_one_dies_the_others_go_on_and_the_end_is_no_clean_one(tmp_path: Path) -> None:
    def announce(ranks: RankProcesses, urls: str) -> None:
        kill(ranks, 1)
        ranks.children[1].exited.add_done_callback(lambda _: ranks.stop())

    outcome = run(tmp_path / "j", announce)
    assert outcome.status == 1
    assert "prefill.dp1 (signal 9 (SIGKILL))" in outcome.reason
    assert left(tmp_path / "j") == ["prefill.dp0", "prefill.dp2"]


def test_it_ends_when_all_have_died(tmp_path: Path) -> None:
    outcome = run(tmp_path / "j", lambda ranks, _: kill(ranks, 0, 1, 2))
    assert outcome == ServeResult(1, "nothing can serve any more: no prefill is left")


@pytest.mark.parametrize(("behaviour", "status"), [("refuse", 2), ("crash", 1)])
def test_a_rank_that_cannot_start_ends_all(tmp_path: Path, behaviour: str, status: int) -> None:
    outcome = run(tmp_path / "j", behaviours={"prefill.dp2": behaviour})
    assert outcome.status == status
    assert outcome.reason.startswith("prefill.dp2")


async def test_ranks_that_share_out_experts_have_sockets_to_one_another_and_nobody_else_has(
    tmp_path: Path,
) -> None:
    supervisor = supervised.make(tmp_path / "j", lambda *_: None)
    config = InstanceConfig(model="m", registry="http://127.0.0.1:9", dp=3, enable_expert_parallel=True)
    given: list[str | None] = []

    def command(role: Role, config: InstanceConfig | FrontendConfig) -> Sequence[str]:
        assert isinstance(config, InstanceConfig)
        given.append(config.dp_fds)
        return [sys.executable, "-c", "import sys; sys.exit(int(sys.argv[1].count(',')))", str(config.dp_fds)]

    specs = leaders(supervisor, config, command, ())
    assert given == [",".join(str(s.fileno()) for s in spec.sockets) for spec in specs]
    assert [len(spec.sockets) for spec in specs] == [2, 1, 1]

    for spec in specs:
        child = await Child.start(spec, Console(io.StringIO()), 0)
        assert await child.exited == len(spec.sockets) - 1
        child.listens.cancel()
    assert [s.fileno() for spec in specs for s in spec.sockets] == [-1] * 4, "closed here"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dp": 1}, "there is one; give --dp"),
        ({"dp": 2, "tp": 2}, "DP ranks of one process each; set --tp"),
    ],
)
def test_what_cannot_share_out_experts_is_refused(settings: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        InstanceConfig(model="m", registry="http://127.0.0.1:9", enable_expert_parallel=True, **settings)  # type: ignore[arg-type]
    ranks = {f"prefill_{name}": value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=text):
        RanksConfig(**ranks, enable_expert_parallel=True)


def test_a_side_of_one_rank_holds_all_experts(tmp_path: Path) -> None:
    ranks = RanksConfig(decode_dp=2, enable_expert_parallel=True)
    config = supervised.make(tmp_path / "j", lambda *_: None, ranks=ranks).config
    made = [
        config.instance(role, "i", Host(4, 2**34), "http://127.0.0.1:9")
        for role in (Role.PREFILL, Role.DECODE)
    ]
    assert [one.enable_expert_parallel for one in made] == [False, True]


async def test_the_ranks_of_a_deployment_are_children_of_its_supervisor(tmp_path: Path) -> None:
    seen: list[InstanceConfig | FrontendConfig] = []
    ranks = RanksConfig(prefill_dp=2, decode_dp=2)
    supervisor = supervised.make(tmp_path / "j", lambda *_: None, prefill=2, ranks=ranks)
    supervisor.command = lambda role, config: seen.append(config) or argv(config)
    planned = zip(supervised.specs(supervisor), seen, strict=True)
    made = [(spec.name, config) for spec, config in planned if isinstance(config, InstanceConfig)]
    assert [name for name, _ in made] == [
        "prefill-0.dp0",
        "prefill-0.dp1",
        "prefill-1.dp0",
        "prefill-1.dp1",
        "decode-0.dp0",
        "decode-0.dp1",
    ]
    assert [config.dp_rank for _, config in made] == [0, 1] * 3
    incarnations = [config.incarnation for _, config in made]
    assert [incarnations.index(one) for one in incarnations] == [0, 0, 2, 2, 4, 4]
