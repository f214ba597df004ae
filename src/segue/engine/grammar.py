"""Output formats: JSON, JSON schema, regex and Lark grammars, through llguidance.

A compiled grammar is kept as a matcher in its first state, and a sequence gets a copy (7 µs). The state
depends on the tokens alone, so a first token drawn on prefill and told to decode leads to the same masks
on both sides. For the same reason the limits on a grammar are counts of work, never seconds: both sides,
on any machine, take or refuse the same grammars. At the limits compiling took 0.1 s. Some constructs are not
counted by the library: `prepare` tries a grammar in a process with limits of its own (`grammar_check`) and
compiles it on a thread, so that the leader's thread only looks up what is compiled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from numpy.typing import NDArray

from segue.engine.grammar_check import GrammarChecker
from segue.engine.grammar_compile import compile_grammar, make_tokenizer, one_line
from segue.engine.request import MAX_GRAMMAR_BYTES, Grammar
from segue.kv import Internal, InvalidRequest, OutOfCapacity, SegueError

if TYPE_CHECKING:
    import transformers

MAX_CACHED = 64
#: Memory of the compiled grammars that are kept, as they were measured when they were tried.
MAX_CACHED_BYTES = 256 * 2**20
#: Grammars that wait to be compiled, of one tenant and of all.
MAX_PREPARING = 64
MAX_PREPARING_IN_ALL = 1024


class GrammarMatcher:
    """The state of one sequence in its grammar. Once stuck it stays stuck."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._refused: int | None = None

    @property
    def finished(self) -> bool:
        """The text is complete and cannot go on: only an end-of-sequence token is admitted."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def accepting(self) -> bool:
        """The text so far is complete, though it may go on."""
        return bool(self._matcher.is_accepting())

    def admitted(self) -> NDArray[np.bool_]:
        """One flag per token of the vocabulary; the array is the caller's.

        InvalidRequest once the grammar is stuck: it refused a token, or became too complex.
        """
        if self._refused is None and not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if not self._matcher.is_error():
                flags = np.zeros(self._vocab_size, np.bool_)
                known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
                flags[: len(known)] = known
                return flags
        if self._refused is not None:
            raise InvalidRequest(f"token {self._refused} does not fit the output format")
        raise InvalidRequest(f"the output format cannot be followed: {one_line(self._matcher.get_error())}")

    def accept(self, token: int) -> None:
        """Advance by `token`. If it does not fit, every later `admitted` raises."""
        if self._refused is None and not self._matcher.is_error() and not self._matcher.consume_token(token):
            reason = self._matcher.get_error()
            if "items" not in reason and "lexer error" not in reason:  # not a limit: `admitted` tells those
                self._refused = token


class GrammarCompiler:
    """Compiles grammars for one tokenizer; keeps the last `MAX_CACHED` it was asked for, within
    `MAX_CACHED_BYTES`, and what was refused.

    Making one costs a quarter of a second (the tokenizer is turned into a trie). One thread only, apart from
    the thread that `prepare` starts.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerFast,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        checker: Callable[[str, int, list[int]], GrammarChecker] = GrammarChecker,
    ) -> None:
        eos = sorted(eos_token_ids)
        words = max(vocab_size, len(tokenizer))
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        text = backend.to_str()
        self._tokenizer = make_tokenizer(text, words, eos)
        self._checker = checker(text, words, eos)
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[Grammar, tuple[llguidance.LLMatcher | SegueError, int]] = OrderedDict()
        #: handed over by the thread; settled by the owner
        self._prepared: dict[Grammar, tuple[llguidance.LLMatcher | SegueError, int]] = {}
        #: grammars that are not settled, with the tenants that asked for them
        self._preparing: dict[Grammar, str] = {}
        self._lock = threading.Lock()
        #: grammars that wait for the thread, by tenant; the first tenant is next
        self._waiting: dict[str, deque[tuple[Grammar, Callable[[], None]]]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """Compiled grammars in the cache."""
        return sum(not isinstance(kept, SegueError) for kept, _ in self._compiled.values())

    def open(self, grammar: Grammar) -> GrammarMatcher:
        """A fresh state of `grammar`. InvalidRequest with the library's reason if it cannot be compiled.

        Compiles on this thread, without a limit on time, what was not prepared."""
        if grammar not in self._compiled:
            self._check_size(grammar)
            self._keep(grammar, (compile_grammar(self._tokenizer, grammar), 0))
        matcher, _ = self._compiled[grammar]
        self._compiled.move_to_end(grammar)
        if isinstance(matcher, SegueError):
            raise type(matcher)(matcher.info.text)
        return GrammarMatcher(matcher.deep_copy(), self._vocab_size)

    # ---- beside the owner's thread -----------------------------------------------------------------

    def known(self, grammar: Grammar) -> bool:
        """Whether `open` answers at once, and another try would not help."""
        if len(grammar.text) > MAX_GRAMMAR_BYTES:
            return True
        kept, _ = self._compiled.get(grammar, (None, 0))
        return kept is not None and (not isinstance(kept, SegueError) or isinstance(kept, InvalidRequest))

    def prepare(self, grammar: Grammar, done: Callable[[], None], tenant: str = "") -> None:
        """Compile `grammar` within limits of time and memory, then call `done` on another thread: `settle`
        makes it known. Tenants take turns. OutOfCapacity if too many of `tenant` wait, or too many in all.
        One call per grammar until it is settled."""
        own = sum(asked == tenant for asked in self._preparing.values())
        if own >= MAX_PREPARING or len(self._preparing) >= MAX_PREPARING_IN_ALL:
            raise OutOfCapacity(f"{own} output formats wait to be compiled; try again")
        self._preparing[grammar] = tenant
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((grammar, done))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="segue-formats")
        self._thread.submit(self._prepare_next)

    def settle(self, grammar: Grammar) -> None:
        """Take over what became of `grammar`: until another one is settled, `open` answers at once."""
        self._preparing.pop(grammar, None)
        self._keep(grammar, self._prepared.pop(grammar))

    def close(self) -> None:
        """End the process and the thread that prepare."""
        self._checker.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _prepare_next(self) -> None:
        """Prepare one grammar of the tenant whose turn it is."""
        with self._lock:
            tenant = next(iter(self._waiting))
            waiting = self._waiting.pop(tenant)
            grammar, done = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting
        self._prepare(grammar, done)

    def _prepare(self, grammar: Grammar, done: Callable[[], None]) -> None:
        try:
            self._check_size(grammar)
            size = self._checker.check(grammar)
            self._prepared[grammar] = compile_grammar(self._tokenizer, grammar), size
        except SegueError as error:
            self._prepared[grammar] = error, 0
        except Exception as exc:  # the boundary: whoever waits for it must be answered
            self._prepared[grammar] = Internal(f"a bug while compiling an output format: {exc!r}"), 0
        done()

    def _check_size(self, grammar: Grammar) -> None:
        size = len(grammar.text.encode(errors="replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"The output format has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}.")

    def _keep(self, grammar: Grammar, kept: tuple[llguidance.LLMatcher | SegueError, int]) -> None:
        self._compiled[grammar] = kept
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > 1 and (
            len(self._compiled) > MAX_CACHED
            or sum(size for _, size in self._compiled.values()) > MAX_CACHED_BYTES
        ):
            self._compiled.popitem(last=False)
