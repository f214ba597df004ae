# ruff: noqa: E501
"""One-line sabotages of the production code; the simulator must catch each of them.

Each names a file under `src/segue`, a text that occurs there exactly once, what replaces it, and why a
reviewer might have let it pass. A sabotage that changes nothing observable has no place here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One sabotage."""

    name: str
    file: str
    old: str
    new: str
    why: str


RECEIVER, SENDER, EXCHANGE = "handoff/receiver.py", "handoff/sender.py", "handoff/exchange.py"
DECODE, PREFILL, BASE = "roles/decode.py", "roles/prefill.py", "roles/base.py"
ATTEMPTS, KEPT, JOB = "balance/attempts.py", "roles/kept.py", "roles/job.py"
PAGES, PREFIX = "engine/pages.py", "engine/prefix.py"
CONTENT = "layout/content.py"
ABSENT = "handoff/absent.py"
INBOX, KEEPALIVE = "session/inbox.py", "session/keepalive.py"
NODE = "session/node.py"
MANAGER, CONNECTION, LEADER = "conn/manager.py", "session/connection.py", "serve/leader.py"

MUTANTS = (
    # ---- fences and proofs -----------------------------------------------------------------
    Mutant(
        "release without proof",
        RECEIVER,
        "out.append(Quarantined(self.transfer, self.lease.pages))",
        "self._prove(out)",
        "a failed receiver gives its published pages back at once",
    ),
    Mutant(
        "unproven fence is a proof",
        RECEIVER,
        "return self._prove(out) if proven else self.state is ReceiverState.QUARANTINED",
        "return self._prove(out)",
        "the answer to a fence is taken as a proof, whatever it says",
    ),
    Mutant(
        "a lost session is a death",
        RECEIVER,
        "        if dead:\n            self._prove(out)",
        "        self._prove(out)",
        "silence is taken as proof that the peer cannot write any more",
    ),
    Mutant(
        "Drained before the fence",
        SENDER,
        "        if posted:\n            return\n        self.lease.end(LeaseStep.UNUSED)",
        "        if posted:\n            out.append(Send(self.peer, Drained(self.transfer)))\n            return\n"
        "        self.lease.end(LeaseStep.UNUSED)",
        "prefill promises that no write runs before it knows",
    ),
    Mutant(
        "source pages not leased while written",
        SENDER,
        "if len(part) and self.lease.state is LeaseState.HELD:",
        "if False:",
        "a failing sender forgets that the transport still reads its pages",
    ),
    Mutant(
        "sender skips its fence",
        SENDER,
        "            out.append(Fence(self.transfer, self.epoch))\n        out.append(Phase(self.transfer, KVPoll.FAILED",
        "            out.append(Release(self.transfer))\n        out.append(Phase(self.transfer, KVPoll.FAILED",
        "source pages are released while writes run",
    ),
    Mutant(
        "receiver skips its fence",
        RECEIVER,
        "        out.append(Fence(self.transfer, self.epoch))\n        out.append(Quarantined(",
        "        out.append(Quarantined(",
        "the transport goes on accepting writes of a failed hand-off",
    ),
    Mutant(
        "no fence after success",
        RECEIVER,
        "        out.append(Send(self.peer, Committed(self.transfer)))\n        out.append(Fence(self.transfer, self.epoch))\n",
        "        out.append(Send(self.peer, Committed(self.transfer)))\n",
        "the grant of a finished hand-off stays",
    ),
    Mutant(
        "no grant",
        RECEIVER,
        "        out.append(Grant(self.transfer, epoch))\n",
        "",
        "the transport is never told that writes may land",
    ),
    Mutant(
        "the proof is not asked for again",
        RECEIVER,
        "            out.append(Send(self.peer, Abort(self.transfer)))\n\n    def peer_down",
        "            pass\n\n    def peer_down",
        "after a reconnection nobody asks for the word that was lost",
    ),
    Mutant(
        "no Abort",
        RECEIVER,
        "        if not lost:\n            out.append(Send(self.peer, Abort(self.transfer)))\n",
        "        if lost:\n            out.append(Send(self.peer, Abort(self.transfer)))\n",
        "decode fails and asks a lost peer, not the one that is there, for a proof",
    ),
    Mutant(
        "Drained is no proof",
        RECEIVER,
        "            self.fail(self.problem(TransferFailed, text, now), now, out, told=True)\n            self._prove(out)\n",
        "            self.fail(self.problem(TransferFailed, text, now), now, out, told=True)\n",
        "the peer's word is heard and nothing is released",
    ),
    Mutant(
        "no Drained",
        SENDER,
        "        out.append(Send(self.peer, Drained(self.transfer)))\n        self._let_go(out)\n        return True",
        "        self._let_go(out)\n        return True",
        "prefill forgets to give its word",
    ),
    Mutant(
        "no Gone",
        ABSENT,
        '        self._counters["gone_answers"] += 1\n        out.append(Send(event.peer, Gone(transfer)))',
        '        self._counters["gone_answers"] += 1',
        "a question about a finished hand-off is not answered",
    ),
    Mutant(
        "the proof is shown once only",
        EXCHANGE,
        "            result = self._once_more(machine, now, out, step, args)\n",
        "",
        "a handler that broke on the proof never sees it again",
    ),
    # ---- commit ------------------------------------------------------------------------------
    Mutant(
        "no metadata gate",
        "handoff/tally.py",
        "return not self.pending and not self.unverified and self.metadata is not None",
        "return not self.pending and not self.unverified",
        "decode runs before it knows the first token",
    ),
    Mutant(
        "one chunk is enough",
        "handoff/tally.py",
        "        if message.final:\n            self.pending.discard(pair)",
        "        self.pending.discard(pair)",
        "responders are counted and not what they sent",
    ),
    Mutant(
        "forget Committed",
        RECEIVER,
        "        out.append(Send(self.peer, Committed(self.transfer)))\n",
        "",
        "prefill holds its pages until the deadline",
    ),
    Mutant(
        "announced before it landed",
        SENDER,
        "while queue and queue[0].landed and queue[0].summed:",
        "while queue and queue[0].summed:",
        "a chunk is announced when another one has landed",
    ),
    Mutant(
        "landed at once",
        SENDER,
        "final, landed=not pair_blocks)",
        "final, landed=True)",
        "posting a write is taken for its completion",
    ),
    # ---- integrity ---------------------------------------------------------------------------
    Mutant(
        "commit before it is verified",
        "handoff/tally.py",
        "return not self.pending and not self.unverified and self.metadata is not None",
        "return not self.pending and self.metadata is not None",
        "decode runs while the last chunks are still being hashed",
    ),
    Mutant(
        "the checksum is computed and ignored",
        "handoff/tally.py",
        "if checksum != message.checksum:",
        "if False:",
        "whatever has landed is right",
    ),
    Mutant(
        "announced without its checksum",
        SENDER,
        "while queue and queue[0].landed and queue[0].summed:",
        "while queue and queue[0].landed:",
        "a fast write overtakes its checksum, and decode has nothing to compare with",
    ),
    Mutant(
        "V is not hashed",
        CONTENT,
        "(True, shape.v_dim, spec.v_token_bytes),",
        "(True, 0, spec.v_token_bytes),",
        "half of the content is outside the checksum, on both sides alike",
    ),
    Mutant(
        "the last layer is not hashed",
        CONTENT,
        "for index in range(first, part.layers, every):",
        "for index in range(first, max(1, part.layers - 1), every):",
        "an off-by-one in the range, on both sides alike",
    ),
    Mutant(
        "decode verifies another range",
        RECEIVER,
        "            message.span,\n            self.pages,",
        "            type(message.span)(message.span.start, max(message.span.start + 1, message.span.end - 1)),\n            self.pages,",
        "the last token of a chunk is left out on one side",
    ),
    Mutant(
        "decode hashes all layers of a sample",
        RECEIVER,
        "Sample(message.every, self.transfer.room",
        "Sample(1, self.transfer.room",
        "the mode of the message is not looked at",
    ),
    Mutant(
        "pages released while they are verified",
        RECEIVER,
        "if not self._proven or (self.tally is not None and self.tally.unverified):",
        "if not self._proven:",
        "a fence proves that nobody writes, not that nobody reads",
    ),
    Mutant(
        "source pages released while they are hashed",
        SENDER,
        "        if self._fenced and not self._reading:\n            self.go(",
        "        if self._fenced:\n            self.go(",
        "a failing sender forgets that its pages are being read",
    ),
    Mutant(
        "the last read lets nothing go",
        RECEIVER,
        "        if self.state is ReceiverState.QUARANTINED:\n            self._let_go(out)\n",
        "        if self.state is ReceiverState.QUARANTINED:\n            pass\n",
        "proven while a verification ran: nobody asks again",
    ),
    # ---- failure is told, and bounded ---------------------------------------------------------
    Mutant(
        "decode's failure is not told",
        RECEIVER,
        "        if not told and not lost:\n            out.append(Send(self.peer, Failed(self.transfer, error)))\n        if not published:",
        "        if not published:",
        "a receiver that had published nothing dies in silence",
    ),
    Mutant(
        "no deadline while transferring",
        "handoff/machine.py",
        "if not self.phase.terminal:\n            self.fail(self.deadline_error(now), now, out)",
        "if not self.phase.terminal and self.phase is not KVPoll.TRANSFERRING:\n            self.fail(self.deadline_error(now), now, out)",
        "one phase has no deadline",
    ),
    Mutant(
        "no deadline in a role",
        BASE,
        "            self.fail(job, late.info, now)",
        '            if job.phase not in ("reserve", "decode"):\n                self.fail(job, late.info, now)',
        "two queues have no deadline",
    ),
    Mutant(
        "sender ignores a lost peer",
        SENDER,
        "        self.fail(self.fill(error, now), now, out, lost=True)",
        "        self.peer_name = self.peer_name",
        "the peer is gone and the sender waits",
    ),
    Mutant(
        "every lost peer fails everybody",
        EXCHANGE,
        "return [m for m in self._machines.values() if m.peer == peer]",
        "return list(self._machines.values())",
        "one peer's end is taken for all peers' ends",
    ),
    Mutant(
        "abort does nothing",
        EXCHANGE,
        "            self._run(machine, now, out, machine.fail, machine.fill(event.error, now))",
        "            machine.error = event.error",
        "a cancelled request leaves its hand-off behind",
    ),
    Mutant(
        "a handle's abort does nothing",
        "conn/handles.py",
        "        self._owner.post(api.AbortTransfer(self.transfer, info))",
        "        self.error = info",
        "the engine's abort does not reach the protocol",
    ),
    Mutant(
        "an exception ends the loop",
        EXCHANGE,
        "            machine.fail(machine.problem(Internal, text, now), now, out)\n",
        "            raise\n",
        "one hand-off's handler takes everybody down",
    ),
    Mutant(
        "latched phase",
        RECEIVER,
        "        _S.QUARANTINED: KVPoll.FAILED,",
        "        _S.QUARANTINED: KVPoll.TRANSFERRING,",
        "a failed receiver looks as if it went on",
    ),
    # ---- identity ----------------------------------------------------------------------------
    Mutant(
        "no tombstone",
        EXCHANGE,
        "        self._absent.bury(machine, now)",
        "        self._deadlines.cancel(machine.timer)",
        "what is over is forgotten at once",
    ),
    Mutant(
        "epochs start again",
        EXCHANGE,
        "epoch = self._last_epoch + 1",
        "epoch = self._last_epoch or 1",
        "an epoch is used for two hand-offs",
    ),
    Mutant(
        "early destination stays",
        ABSENT,
        "early = self.early.pop(transfer, None)",
        "early = self.early.get(transfer)",
        "a parked destination is used and kept",
    ),
    Mutant(
        "early destination outlives its session",
        ABSENT,
        "            self._end_early(transfer, self._record(error, transfer, name), now)",
        "            self.early[transfer] = self.early[transfer]",
        "a destination of a lost peer is obeyed later",
    ),
    Mutant(
        "lost peers are remembered",
        EXCHANGE,
        "link = self._links.pop(event.peer, None)",
        "link = self._links.get(event.peer)",
        "tables grow with every peer that ever was",
    ),
    Mutant(
        "opened after its end",
        ABSENT,
        "        if ended is None:\n            return False\n        ended.opened = True",
        "        if ended is None or not ended.opened:\n            return False\n        ended.opened = True",
        "a half whose peer has given up waits for it",
    ),
    Mutant(
        "rooms are not checked",
        "handoff/ticket.py",
        "    if not 1 <= ticket.room < 2**64 or not 0 <= ticket.attempt < 2**16:",
        "    if ticket.room == 1 << 70:",
        "a client's room 0 gets as far as the leader's loop",
    ),
    Mutant(
        "a budget that is no number",
        "handoff/ticket.py",
        "    if not math.isfinite(ticket.budget_s):",
        "    if math.isinf(ticket.budget_s):",
        "a deadline that never comes",
    ),
    # ---- leases of roles ---------------------------------------------------------------------
    Mutant(
        "quarantine forgotten",
        DECODE,
        "                entry.quarantined = True\n                self.pool.quarantine(self._published(job))",
        "                entry.quarantined = False",
        "pages that a peer may write are not marked",
    ),
    Mutant(
        "pages released at the abort",
        DECODE,
        "            entry.handle.abort(error)",
        "            entry.handle.abort(error)\n            self.pool.release(job.pages)\n            job.pages = []",
        "decode takes its pages back before the peer has let go",
    ),
    Mutant(
        "source pages released at the abort",
        PREFILL,
        "            entry.handle.abort(error)",
        "            entry.handle.abort(error)\n            self.pool.release(job.pages)\n            job.pages = []",
        "prefill takes its pages back while the transport reads them",
    ),
    Mutant(
        "cached pages released twice",
        DECODE,
        "            self.pool.release(job.pages[: job.cached // self.pool.page_tokens])\n",
        "            self.pool.release(job.pages[: job.cached // self.pool.page_tokens])\n"
        "            self.pool.release(job.pages[: job.cached // self.pool.page_tokens])\n",
        "a shared prefix loses a lease that others count on",
    ),
    Mutant(
        "cached pages not released",
        DECODE,
        "            self.pool.release(job.pages[: job.cached // self.pool.page_tokens])\n",
        "",
        "a failed hand-off keeps its cached prefix",
    ),
    Mutant(
        "match not given back",
        DECODE,
        "            self.pool.release(match.pages)\n            return False",
        "            return False",
        "a full pool leaks a lease at each look",
    ),
    Mutant(
        "source pages never released",
        PREFILL,
        "                self.pool.release(job.pages)\n                job.pages = []\n                self.table.remove",
        "                job.pages = []\n                self.table.remove",
        "prefill's pages are gone after a hand-off",
    ),
    Mutant(
        "published from one page too far",
        DECODE,
        "return job.pages[job.cached // self.pool.page_tokens :]",
        "return job.pages[job.cached // self.pool.page_tokens + 1 :]",
        "prefix off by one",
    ),
    Mutant(
        "a success after the end",
        DECODE,
        "        if job.ended:\n            return  # its frontend left",
        "        if job.ended and job.tokens < 0:\n            return  # its frontend left",
        "a request that was cancelled as it landed runs anyway",
    ),
    Mutant(
        "prefill's job stays",
        PREFILL,
        "                self.end(job, None, now)",
        "                job.enter('done', now)",
        "a finished request keeps its place",
    ),
    Mutant(
        "handles are kept",
        "conn/handles.py",
        "        self._owner.forget(self.transfer)",
        "        self.released = True",
        "one handle leaks per hand-off",
    ),
    Mutant(
        "sequences stay open",
        BASE,
        "            self.engine.close(job.seq_id)\n",
        "            pass\n",
        "the engine keeps every sequence",
    ),
    # ---- pages, prefixes, generation -----------------------------------------------------------
    Mutant(
        "freed with other owners",
        PAGES,
        "            if counts[page] == held:\n                freed.append(page)",
        "            freed.append(page)",
        "the first owner to leave frees the page",
    ),
    Mutant(
        "shared twice",
        PAGES,
        "        for page in pages:\n            counts[page] += 1\n        self.version += 1",
        "        for page in pages:\n            counts[page] += 2\n        self.version += 1",
        "a cached page is never free again",
    ),
    Mutant(
        "quarantine is not counted down",
        PAGES,
        "        self._quarantined -= len(freed)\n",
        "",
        "capacity shrinks with each failure",
    ),
    Mutant(
        "a match without a lease",
        PREFIX,
        "        self._pool.share(pages)\n        found",
        "        found",
        "cached pages are used without owning them",
    ),
    Mutant(
        "the first page decides",
        PREFIX,
        "            if tokens[at : at + len(child.tokens)] == child.tokens:",
        "            if at + len(child.tokens) <= len(tokens):",
        "a prefix is taken for equal after its first page",
    ),
    Mutant(
        "cached before it is computed",
        "roles/prompts.py",
        '        job.enter("prefill", now)',
        '        desk.remember(job, len(prompt))\n        job.enter("prefill", now)',
        "others find pages that are still being written",
    ),
    Mutant(
        "one token too many remembered",
        "roles/generation.py",
        "            self.desk.remember(job, job.computed)",
        "            self.desk.remember(job, job.computed + 1)",
        "the last token's KV was never computed, but is cached",
    ),
    Mutant(
        "retraction forgets a page",
        "roles/generation.py",
        "held = desk.pool.pages_for(job.computed)",
        "held = desk.pool.pages_for(job.computed - 1)",
        "a retracted sequence comes back without its last page",
    ),
    Mutant(
        "prefix off by one",
        "layout/planner.py",
        "dst_slot + token - dst_token)",
        "dst_slot + token - dst_token + (token % 2))",
        "bytes land one token too far",
    ),
    Mutant(
        "prompts are not compared",
        DECODE,
        "        if metadata.prompt_hash != job.prompt_hash:",
        "        if metadata.prompt_tokens != len(job.prompt):",
        "two requests under one room become one answer",
    ),
    Mutant(
        "spent ticket accepted",
        BASE,
        "        self._spent.spend(ticket, deadline, now)\n",
        "",
        "a ticket that was seen before places another request",
    ),
    Mutant(
        "models are not compared",
        "conn/peers.py",
        "    if theirs.model != mine.model:",
        "    if not theirs.model:",
        "KV of another model is let in",
    ),
    # ---- a request that outlives its workers -----------------------------------------------------
    Mutant(
        "a continuation starts again",
        ATTEMPTS,
        "            output=list(self.output),\n",
        "            output=[],\n",
        "the tokens that the client has are forgotten",
    ),
    Mutant(
        "a continuation loses its seed",
        ATTEMPTS,
        "            sampling=sampling,\n",
        "            sampling=replace(sampling, seed=0),\n",
        "the same request, drawn anew",
    ),
    Mutant(
        "attempts without bound",
        ATTEMPTS,
        "if not elsewhere or self.begun >= self.limit:",
        "if not elsewhere:",
        "a request that fails everywhere is placed for ever",
    ),
    Mutant(
        "asked again on the lost one",
        ATTEMPTS,
        "        for tier in (self.avoid, self.lost):",
        "        for tier in (self._pair_failures,):",
        "a session that came back makes its instance look as good as any",
    ),
    Mutant(
        "tokens of the attempt before are not counted",
        JOB,
        "        return len(self.request.output) + len(self.output)",
        "        return len(self.output)",
        "a continued generation counts from zero",
    ),
    Mutant(
        "the output is not part of the sequence",
        JOB,
        "request.prompt + request.output if request.output else request.prompt",
        "request.prompt",
        "a continuation computes the prompt alone",
    ),
    Mutant(
        "the engine is not told of the output",
        BASE,
        "self.engine.open(job.seq_id, request.prompt, request.sampling, request.output)",
        "self.engine.open(job.seq_id, request.prompt, request.sampling)",
        "sampler state begins anew",
    ),
    Mutant(
        "the output counts as prompt",
        DECODE,
        "first_usage(len(job.request.prompt), job.cached",
        "first_usage(len(job.prompt), job.cached",
        "a client pays for what it was given",
    ),
    Mutant(
        "what was not computed is kept",
        PREFILL,
        "        self.remember(job, job.computed)\n        if job.metadata",
        "        self.remember(job, len(job.prompt))\n        if job.metadata",
        "pages of a prompt that failed on the way go into the prefix tree whole",
    ),
    Mutant(
        "the kept tail is not put back",
        PREFILL,
        "            self.engine.copy_in(kept.tail, tail)",
        "            tail = list(tail)",
        "the last page of a kept prompt is whatever lay there",
    ),
    Mutant(
        "a kept prompt whose pages went is answered all the same",
        PREFILL,
        "        if match.tokens == tokens // size * size:\n",
        "        if match.tokens >= 0:\n",
        "eviction is forgotten",
    ),
    Mutant(
        "pages of a kept prompt leak",
        PREFILL,
        "            self.pool.release(match.pages)\n            return False",
        "            return False",
        "a match that is not used is not given back",
    ),
    # ---- sessions, the manager's I/O half, the leader ----------------------------------------
    Mutant(
        "few early messages",
        MANAGER,
        "len(peer.early) >= EARLY_PER_TRANSFER * self.config.limits.max_transfers",
        "len(peer.early) >= self.config.limits.max_early_destinations",
        "a peer that has much to say on a new session can never open one (this was a bug)",
    ),
    Mutant(
        "early messages are lost",
        MANAGER,
        "            peer.early.append(message)",
        "            return",
        "what comes before the path is open is dropped",
    ),
    Mutant(
        "a lost session is no event",
        MANAGER,
        "        self._handle(api.PeerDown(incarnation, error.info))\n        if (dialer",
        "        if (dialer",
        "hand-offs of an ended session go on waiting",
    ),
    Mutant(
        "a lost peer is not dialled again",
        "conn/peers.py",
        "        self._lost.set()",
        "        self._lost.clear()",
        "the dialler sleeps through the end of its session",
    ),
    Mutant(
        "no timer for deadlines",
        MANAGER,
        "        self._timer = None\n        self._handle(api.Tick())",
        "        self._timer = None",
        "the exchange never hears of the time",
    ),
    Mutant(
        "a dead process is not reported",
        MANAGER,
        "            self._handle(api.PeerDown(incarnation, event.error.info, dead=event.proven))",
        "            self._handle(api.PeerDown(incarnation, event.error.info, dead=False))",
        "the kernel's word that nothing can land any more is thrown away",
    ),
    Mutant(
        "silence is not judged",
        KEEPALIVE,
        "        if now - self.heard_at >= limits.peer_silence_s:\n            self._silent",
        "        if now - self.heard_at >= limits.peer_silence_s:\n            self.heard_at = now\n"
        "        if now < self.heard_at:\n            self._silent",
        "a peer behind a cut network is waited for",
    ),
    Mutant(
        "no keepalive",
        KEEPALIVE,
        "            self._ping()",
        "            self.sent_at = now",
        "two sides with nothing to say take one another for dead",
    ),
    Mutant(
        "frames are not verified",
        INBOX,
        "        if mark != body_check(body):",
        "        if mark != mark:",
        "a flipped bit in a message is believed",
    ),
    Mutant(
        "nobody hears of the end of a session",
        CONNECTION,
        "        self._closed_due = was_open",
        "        self._closed_due = False",
        "`closed` is never delivered",
    ),
    Mutant(
        "a frontend's end is not delivered",
        "serve/control.py",
        "                self.deliver(FrontendGone(incarnation, error.info))",
        "                self.deliver",
        "requests of a dead frontend are generated to their end",
    ),
    Mutant(
        "what is known waits for the next forward",
        LEADER,
        "        steps = self.role.plan(now)\n        self._flush()\n",
        "        steps = self.role.plan(now)\n",
        "outputs without a forward after them are never sent",
    ),
    # ---- who answers at an address -----------------------------------------------------------
    Mutant(
        "whoever answers will do",
        NODE,
        "if connection.expect is not None and hello.incarnation != connection.expect:",
        "if connection.expect is not None and not hello.incarnation:",
        "an address is taken for a peer: its successor there, or another role, is talked to in its name",
    ),
    Mutant(
        "one host, one instance",
        NODE,
        '        return f"{remote_host}:{port}"\n',
        "        return remote_host\n",
        "a neighbour that comes to the same host ends the sessions of whoever is there (only `move` shows it)",
    ),
    Mutant(
        "a place for each role",
        NODE,
        "            connection.place = connection.remote_address()\n",
        '            connection.place = f"{hello.role} {connection.remote_address()}"\n',
        "an instance that came back in another role leaves its old session behind (only `role change` shows it)",
    ),
)
