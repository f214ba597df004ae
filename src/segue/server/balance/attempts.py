"""The attempts of one request: what was tried, what came of it, what to do next.

A policy object without I/O or clock, driven by the frontend and, as it is, by the simulator. It knows three
answers to a failure. Before the first token the request is *placed again*, preferably on the same prefill
replica, which still holds the prompt's KV. After `k` tokens it is *continued*: another pair is given the
prompt and, apart from it, the `k` tokens (`Request.output`), so that random numbers, penalties, `min_tokens`
and grammars go on where they were. Or it *ends*, with the one error that was its last.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from segue.engine.request import Output, Request, Usage
from segue.kv import ErrorCode, ErrorInfo, Internal, LeaderId
from segue.server.balance.policy import Candidate, PlacementRequest, Policy
from segue.server.settings.shared_config import MAX_ATTEMPTS

#: The other side of the pair is gone, as the one that says so sees it.
LOSSES = frozenset({ErrorCode.PEER_LOST, ErrorCode.PEER_RESTARTED})

#: The two halves cannot be joined: another try of this pair is in vain, another pair may do.
INCOMPATIBLE = frozenset({ErrorCode.PEER_REFUSED, ErrorCode.LAYOUT_MISMATCH})

#: One half cannot reach the other: it may be either's fault, or that of what is between them.
UNREACHED = frozenset({ErrorCode.BOOTSTRAP_UNREACHABLE, ErrorCode.BOOTSTRAP_TIMEOUT})

#: Something went wrong between the two halves, and neither is known to be at fault.
_OF_THE_PAIR = INCOMPATIBLE | {ErrorCode.TRANSFER_FAILED, ErrorCode.CHECKSUM_MISMATCH}


#: After these, what prefill computed is not to be trusted: it is computed again.
DOUBTS = frozenset({ErrorCode.CHECKSUM_MISMATCH, ErrorCode.METADATA_MISMATCH, ErrorCode.INTERNAL})


class Next(enum.Enum):
    """The step after a failed attempt."""

    END = "end"
    PLACE_AGAIN = "place again"
    CONTINUE = "continue"


class Attempts:
    """One request's attempts, one after the other; at most `limit` of them.

    `begin` starts one, `arrived` takes its outputs, `failed` says what follows its failure.
    """

    def __init__(self, request: Request, limit: int = MAX_ATTEMPTS) -> None:
        self.request = request
        self.limit = limit
        #: How many were begun.
        self.begun = 0
        #: Every token that came, of all attempts: the client has them, or will have them.
        self.output: list[int] = list(request.output)
        #: Replicas this request failed on: asked again only if nobody else is there.
        self.avoid: set[LeaderId] = set()
        #: Replicas in `avoid` that are reported gone.
        self.lost: set[LeaderId] = set()
        #: The last of these was said to be gone by its peer, or took others with it: what we see of them
        #: ourselves may be old.
        self.reported_by_peer = False
        #: The prefill replica that has the prompt's KV, as far as we know.
        self.kv_holder: LeaderId | None = None
        self._route: tuple[LeaderId, LeaderId] | None = None
        self._pair_failures: set[LeaderId] = set()
        self._given = len(self.output)
        self._usage: Usage | None = None
        self._failures: list[ErrorInfo] = []

    @property
    def number(self) -> int:
        """The number of the attempt that runs, from 0; it goes into the ticket."""
        return self.begun - 1

    @property
    def delivered(self) -> bool:
        """A token has come."""
        return len(self.output) > len(self.request.output)

    @property
    def continuing(self) -> bool:
        """The attempt that runs was given tokens of an earlier one."""
        return self._given > len(self.request.output)

    # ---- where ----------------------------------------------------------------------------------

    def candidates(self, candidates: Sequence[Candidate], *, patient: bool) -> Sequence[Candidate]:
        """The candidates that may be asked: those on which this request has not failed. If there are none:
        those that are not reported gone. If there are none: nobody while `patient`, then all.

        `patient`: the peer of a replica has reported it gone, and its successor or its end is about to be
        known.
        """
        for tier in (self.avoid, self.lost):
            fresh = [c for c in candidates if c.leader not in tier]
            if fresh:
                return fresh
        return [] if patient else candidates

    def choose(
        self,
        policy: Policy,
        candidates: Sequence[Candidate],
        request: PlacementRequest,
        *,
        prefill: bool = False,
    ) -> Candidate:
        """One of `candidates`: for the prefill half the one that has the prompt's KV already, if it is
        there, else by `policy`."""
        if prefill and self.kv_holder is not None:
            for candidate in candidates:
                if candidate.leader == self.kv_holder:
                    return candidate
        return policy.choose(candidates, request)

    # ---- an attempt -----------------------------------------------------------------------------

    def begin(self, prefill: LeaderId, decode: LeaderId) -> Request:
        """Start the next attempt on this pair (twice the same replica where it is a unified one).

        Returns what to submit: an id of its own, for a worker may still be ending the attempt
        before, and the tokens so far.
        """
        if self.begun >= self.limit:
            raise Internal(f"attempt {self.begun + 1} of {self.limit}", phase="placement", origin="frontend")
        self.begun += 1
        self._route = (prefill, decode)
        self._given = len(self.output)
        if prefill != decode:
            self.kv_holder = prefill
        request = self.request
        if self.begun == 1:
            return request
        sampling = request.sampling
        if self.delivered and sampling.prompt_logprobs is not None:
            # They came with the first token; asking again would only keep prefill from its cache.
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            request,
            request_id=f"{request.request_id}~{self.number}",
            output=list(self.output),
            sampling=sampling,
        )

    def arrived(self, output: Output) -> Output:
        """An output of the attempt that runs, as the client is to see it.

        Raises Internal where a token was lost or repeated: nobody may guess which.
        """
        if output.token_ids and output.position != len(self.output):
            raise Internal(
                f"an output begins at token {output.position} where {len(self.output)} was expected: one was "
                "lost or repeated",
                phase="stream",
                origin="frontend",
            )
        self.output += output.token_ids
        if self.continuing:
            # The client was told already what its prompt cost and where the first token's time went.
            usage = output.usage
            if usage is not None and self._usage is not None:
                usage = replace(self._usage, output_tokens=usage.output_tokens)
            output = replace(output, usage=usage, timeline={})
        elif output.usage is not None:
            self._usage = output.usage
        if output.request_id != self.request.request_id:
            output = replace(output, request_id=self.request.request_id)
        return output

    # ---- its failure ----------------------------------------------------------------------------

    def failed_replica(self, error: ErrorInfo, reporter: LeaderId) -> LeaderId:
        """The replica of the running attempt that caused `error`; `reporter` is the replica whose leg it
        ended."""
        if self._route is None:
            return reporter
        prefill, decode = self._route
        if error.code in LOSSES or (error.code in UNREACHED and prefill not in self._pair_failures):
            # A half that reports its peer gone is alive itself.
            for leader in self._route:
                if _names(error.peer, leader):
                    return leader
        if error.code in _OF_THE_PAIR and prefill not in self._pair_failures:
            # The cheaper one to change: prefill has the KV.
            return decode
        for leader in self._route:
            if _names(error.origin, leader):
                return leader
        return reporter

    def failed(self, error: ErrorInfo, reporter: LeaderId) -> Next:
        """The running attempt ended with `error`; says what follows, and remembers whom to avoid."""
        self._failures.append(error)
        failed = self.failed_replica(error, reporter)
        self.avoid.add(failed)
        self.reported_by_peer = error.code in LOSSES and failed != reporter
        if error.code in LOSSES:
            self.lost.add(failed)
        if self._route is not None and error.code in _OF_THE_PAIR | UNREACHED:
            self._pair_failures.add(self._route[0])
        if failed == self.kv_holder:
            self.kv_holder = None
        elsewhere = error.retryable or error.code in INCOMPATIBLE
        if not elsewhere or self.begun >= self.limit:
            return Next.END
        return Next.CONTINUE if self.delivered else Next.PLACE_AGAIN

    def kept_failed(self, error: ErrorInfo, prefill: LeaderId) -> None:
        """Prefill's half, which went on after decode's had failed, has ended as well."""
        self.avoid.add(prefill)
        self.kv_holder = None
        if error.code in LOSSES:
            self.lost.add(prefill)

    def prefill_gone(self) -> Next:
        """Decode was placed again, and prefill did not have its half any more: an attempt that does not
        count. The next one is on both."""
        self.limit += 1
        return Next.PLACE_AGAIN

    def lost_together(self, leaders: Collection[LeaderId]) -> None:
        """The replica that was lost last takes all of these with it, whose end we may not have seen yet."""
        self.avoid.update(leaders)
        self.lost.update(leaders)
        self.reported_by_peer = True
        if self.kv_holder in leaders:
            self.kv_holder = None

    def root_cause(self, error: ErrorInfo) -> ErrorInfo:
        """`error`, which ends the request, as the one record of it: earlier failures are in its text."""
        earlier = [e for e in self._failures if e is not error]
        if not earlier:
            return error
        told = ", ".join(f"{e.code} at {e.origin or e.peer or 'a worker'}" for e in earlier)
        where = f"attempt {max(1, self.begun)} of {self.limit}, after {len(self.output)} tokens"
        return replace(error, text=f"{error.text} ({where}; before it: {told})")


def _names(text: str, leader: LeaderId) -> bool:
    """Whether an error's `origin` or `peer` (`decode 3fa94c01 dp0`) means this replica. If no rank or an
    open one (`dp?`) is named, it is the one that was asked."""
    words = [word for word in text.split() if word != "dp?"]
    rank = f"dp{leader.dp_rank}"
    return leader.incarnation[:8] in words and (rank in words or not any(w.startswith("dp") for w in words))
