"""The state of an instance: everything it holds, asked for on the threads that own it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from segue.kv import DeadlineExceeded, Draining, KVManager
from segue.kv.control_plane import ControlPlane
from segue.server.instance.leader import Inspect, Leader
from segue.server.observe.integrity_report import NodeState, busy, process_facts
from segue.server.schedulers.scheduler import Scheduler

#: A leader answers between two steps; one that does not in this time is stuck.
ANSWER_S = 10.0

_Seen = tuple[dict[str, int], dict[str, int], list[str]]


async def instance_state(
    leader: Leader, plane: ControlPlane, manager: KVManager | None, door: Mapping[str, int]
) -> NodeState:
    """The state of the instance; call it on its I/O loop. `door` are the tables of its direct-mode server.
    Raises Draining when its leader has left, DeadlineExceeded when it does not answer."""
    if not leader.running:
        raise Draining("the leader's loop has ended")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Seen] = loop.create_future()

    def tell(seen: _Seen) -> None:
        if not answer.done():
            answer.set_result(seen)

    def inspect(scheduler: Scheduler) -> None:
        seen = _of_scheduler(scheduler)
        loop.call_soon_threadsafe(tell, seen)

    leader.inbox.put(Inspect(inspect))
    try:
        tables, pages, problems = await asyncio.wait_for(answer, ANSWER_S)
    except TimeoutError:
        raise DeadlineExceeded(f"the leader did not answer within {ANSWER_S:g} s") from None
    if manager is not None:
        tables = tables | manager.sizes()
        problems = problems + manager.problems()
    tables = tables | {f"door_{name}": count for name, count in door.items()}
    at_rest = not busy(tables)
    if at_rest and (pages["used"] or pages["quarantined"]):
        problems.append(f"at rest, but of {pages['total']} pages {pages['used']} are used "
                        f"and {pages['quarantined']} quarantined")  # fmt: skip
    descriptors, segments, rss_bytes = process_facts()
    return NodeState(
        role=plane.config.role.value,
        incarnation=plane.config.me.incarnation,
        at_rest=at_rest,
        problems=problems,
        tables=tables,
        sessions=sorted(map(str, plane.sessions)),
        pages=pages,
        descriptors=descriptors,
        segments=segments,
        rss_bytes=rss_bytes,
    )


def _of_scheduler(scheduler: Scheduler) -> _Seen:
    problems = []
    try:
        scheduler.check_integrity()
    except AssertionError as error:
        problems.append(str(error) or "an integrity check of the scheduler failed")
    load = scheduler.load()
    return scheduler.sizes(), {"total": load.pages_total, **load.pages}, problems
