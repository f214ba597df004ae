"""Tries a grammar in a process of its own, with a limit on CPU time and on memory.

Counts bound most of llguidance's work (see `engine.grammar_compile`) but not all: a schema with
`multipleOf: 999983` took 10 s and 350 MiB, a Lark token with `&` and `~` more than a minute. A thread that
computes them cannot be ended, a process can. `GrammarChecker` starts one child (`python -m` this module). It
keeps the tokenizer and forks once for each grammar. The fork compiles it, computes the first mask and says
how much memory that took. The same work in the caller's process is then known to be bounded.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO

from segue.engine.grammar_compile import compile_grammar, make_tokenizer
from segue.engine.request import Grammar
from segue.kv import DECODE_ERRORS, Internal, InvalidRequest, OutOfCapacity

#: CPU seconds and MiB for one grammar. A grammar within the counts takes a tenth of both.
CPU_S = 1.0
MEMORY_MIB = 128
#: The child answers after `CPU_S` of CPU at the latest; a machine so starved that this takes longer refuses.
ANSWER_S = 30.0
#: The child gives way to everything that serves.
_NICE = 10
_MAX_ANSWER = 64 * 2**10


class GrammarChecker:
    """One thread at a time calls `check`; any thread calls `close`."""

    def __init__(
        self,
        tokenizer: str,
        words: int,
        eos: list[int],
        *,
        cpu_s: float = CPU_S,
        memory_mib: int = MEMORY_MIB,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._tokenizer = zlib.compress(tokenizer.encode(), 1)
        self._head = {"words": words, "eos": eos, "cpu_s": cpu_s, "memory_mib": memory_mib}
        self._cpu_s, self._memory_mib, self._answer_s = cpu_s, memory_mib, answer_s
        self._lock = threading.Lock()
        #: held while the child is asked
        self._asking = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, grammar: Grammar) -> int:
        """The bytes that the compiled grammar takes. InvalidRequest for one that is not valid or exceeds a
        limit, OutOfCapacity if the child did not answer."""
        deadline = time.monotonic() + self._answer_s
        with self._asking:
            child = self._started(deadline)
            try:
                answer = _asked(child, {"kind": grammar.kind, "text": grammar.text}, deadline)
            except (OSError, TimeoutError, *DECODE_ERRORS) as exc:
                self._end()
                raise OutOfCapacity(f"the output format could not be tried: {exc!r}; try again") from exc
        if "invalid" in answer:
            raise InvalidRequest(str(answer["invalid"]))
        if "exceeded" in answer:
            raise InvalidRequest(
                f"The output format ({grammar.kind}) takes more than {self._cpu_s:g} s of CPU time or "
                f"{self._memory_mib} MiB to compile ({answer['exceeded']}); make it simpler: "
                "a smaller multipleOf, fewer alternatives, smaller repetitions, no & and ~."
            )
        size = answer.get("bytes")
        if not isinstance(size, int):
            raise Internal("the process that tries output formats gave no size")
        return size

    def close(self) -> None:
        """End the child; a running `check` fails. Its pipes are closed after that: a thread that waits for a
        pipe hears of the child's end, but not that another thread has closed the pipe."""
        with self._lock:
            self._closed = True
            self._kill()
        with self._asking:
            self._end()

    def _started(self, deadline: float) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise OutOfCapacity("the instance is leaving")
            if self._child is not None and self._child.poll() is None:
                return self._child
            root = str(Path(__file__).resolve().parents[2])
            path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
            child = self._child = subprocess.Popen(
                [sys.executable, "-m", "segue.engine.grammar_check"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
                bufsize=0,
            )
            # An owner that never closes this leaves no process behind.
            weakref.finalize(self, _reap, child)
            assert child.stdin is not None
            os.set_blocking(child.stdin.fileno(), False)  # a child that reads nothing has a deadline, too
        try:
            _asked(child, self._head | {"tokenizer": zlib.decompress(self._tokenizer).decode()}, deadline)
        except (OSError, TimeoutError, *DECODE_ERRORS) as exc:
            self._end()
            raise OutOfCapacity(f"the process that tries output formats did not start: {exc!r}") from exc
        return child

    def _kill(self) -> None:
        if self._child is not None:
            _kill(self._child)

    def _end(self) -> None:
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                _reap(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the fork with it


def _reap(child: subprocess.Popen[bytes]) -> None:
    """End the child and close its pipes. Idempotent."""
    _kill(child)
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()


def _asked(child: subprocess.Popen[bytes], question: dict[str, object], deadline: float) -> dict[str, object]:
    """One line to the child, one line from it."""
    assert child.stdin is not None
    assert child.stdout is not None
    asked = memoryview(json.dumps(question).encode() + b"\n")
    answer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdin, selectors.EVENT_WRITE)
        while not answer.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("no answer")
            if asked:
                asked = asked[os.write(child.stdin.fileno(), asked) :]
                if not asked:
                    selector.unregister(child.stdin)
                    selector.register(child.stdout, selectors.EVENT_READ)
                continue
            data = os.read(child.stdout.fileno(), 65536)
            if not data or len(answer) > _MAX_ANSWER:
                raise OSError("the process ended")
            answer += data
    found = json.loads(answer)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


# --- the child's side -------------------------------------------------------------------------


def _memory(field: int) -> int:
    """Bytes: the address space (0) or what is resident (1)."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def _try(tokenizer: object, grammar: Grammar, cpu_s: float, memory_mib: int) -> dict[str, object]:
    """In a fork: compile `grammar` within the limits."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            limit = _memory(0) + memory_mib * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # CPU time; its signal ends the process
            before = _memory(1)
            kept = compile_grammar(tokenizer, grammar)
            answer: dict[str, object] = {"bytes": max(0, _memory(1) - before)}
            del kept
        except InvalidRequest as exc:
            answer = {"invalid": exc.info.text}
        except MemoryError:
            answer = {"exceeded": "memory"}
        except BaseException as exc:
            answer = {"invalid": f"The output format ({grammar.kind}) cannot be compiled: {exc!r}"[:500]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not said:
        ended_by = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}"
        return {"exceeded": "CPU time" if ended_by == "SIGPROF" else f"memory, {ended_by}"}
    found: dict[str, object] = json.loads(said)
    return found


def main(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Answer one line with one line, until there are no more."""

    def say(answer: dict[str, object]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    os.nice(_NICE)
    head = json.loads(questions.readline())
    tokenizer = make_tokenizer(head.pop("tokenizer"), head["words"], head["eos"])
    say({})
    for line in questions:
        asked = json.loads(line)
        say(_try(tokenizer, Grammar(asked["kind"], asked["text"]), head["cpu_s"], head["memory_mib"]))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
