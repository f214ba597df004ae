"""A child without a model: `fake_child.py JOURNAL NAME BEHAVIOUR --lifeline-fd=N --report-fd=N`.

It writes what happens to it into JOURNAL, one `NAME EVENT` a line.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from segue.kv.errors import ConfigError, Internal, PeerRefused
from segue.kv.ids import Role
from segue.server.supervisor.lifeline import CannotStart, Lifeline, Ready


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note_each_line(note: Callable[[str], None]) -> None:
    """Note the supervisor's messages to a frontend."""
    for line in sys.stdin:
        note(f"told {line.strip()}")


def main() -> int:
    journal, name, behaviour, *flags = sys.argv[1:]
    fds = {k: int(v) for k, v in (flag.removeprefix("--").split("=") for flag in flags)}

    def note(event: str) -> None:
        with open(journal, "a", encoding="utf-8") as out:
            out.write(f"{name} {event}\n")

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    lifeline = Lifeline(fds["lifeline-fd"], fds["report-fd"])
    lifeline.watch(grace_s=60.0)
    note(f"pid={os.getpid()} threads={os.environ['OMP_NUM_THREADS']} port={os.environ.get('SEGUE_PORT')}")
    say(f"hello of {name}")
    if behaviour == "crash":
        say("the last word")
        return 3
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "bug":
        lifeline.report(CannotStart(Internal("ValueError: not foreseen").info, 1))
        say("Traceback\nValueError: not foreseen")
        return 1
    if behaviour == "refuse":
        lifeline.report(CannotStart(ConfigError("the model is broken").info, 2))
        return 2
    if behaviour == "refuse-peer":
        lifeline.report(CannotStart(PeerRefused("no").info, 1))
        return 1
    if behaviour == "silent":
        signal.sigwait({signal.SIGTERM})
        note("left")
        return 0
    if name == "frontend":
        threading.Thread(target=note_each_line, args=(note,), daemon=True).start()
    lifeline.report(Ready("http://127.0.0.1:1" if name == "frontend" else ""))
    if behaviour == "switched":
        signal.sigwait({signal.SIGUSR1})
        lifeline.report(Ready(role=Role.PREFILL))
        signal.sigwait({signal.SIGUSR1})
        say("what it says later")
    if behaviour == "late-crash":
        signal.sigwait({signal.SIGUSR1})
        say("out of luck")
        return 7
    signal.sigwait({signal.SIGTERM})
    note("asked")
    if behaviour == "fail-on-leave":
        return 1
    if behaviour == "stubborn":
        while True:
            time.sleep(60)
    note("left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
