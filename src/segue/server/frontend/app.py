"""The routes. `OpenAIServer` is one error boundary per request: whatever happens inside, the client gets an
honest status and the server lives."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from segue import __version__
from segue.engine.request import Wait
from segue.kv import AbortedByClient, DeadlineExceeded, ErrorCode, Internal, Limits, OutOfCapacity, SegueError
from segue.kv.errors import RequestTooLarge
from segue.server.frontend.backend import Backend, Generator
from segue.server.frontend.body_forms import check_levels, unpacked
from segue.server.frontend.body_reader import Body, read_body, unknown_fields
from segue.server.frontend.chat import chat_prompt, shown_tool
from segue.server.frontend.detokenize import decode_in_pieces
from segue.server.frontend.generate import Meter, Piece, generate
from segue.server.frontend.http_call import HttpCall, Receive, Scope, Send, request_id_of
from segue.server.frontend.keys import ApiKeys, KeyCheck
from segue.server.frontend.messages_api import MESSAGES_NAMES, MessagesAnswer, chat_of_messages
from segue.server.frontend.openapi import Operation, document, page
from segue.server.frontend.params import (
    ModelCard,
    cache_salt,
    check_repeated,
    header_rank,
    waiting_order,
)
from segue.server.frontend.plan import Plan, Planner, at_most
from segue.server.frontend.problems import BadParam, UnknownModel, renamed
from segue.server.frontend.refusals import HANDLERS, model_object, model_of
from segue.server.frontend.request_fields import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateFields,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
    TranslatedChat,
)
from segue.server.frontend.request_memory import (
    MIN_BUDGET,
    TOKEN_BYTES,
    MemoryBudget,
    RequestMemory,
    decoded_bytes,
)
from segue.server.frontend.responses_api import RESPONSES_NAMES, ResponsesAnswer, chat_of_responses
from segue.server.frontend.sampling_defaults import OPENAI, SamplingDefaults
from segue.server.frontend.span_attributes import PROVIDER, inference_attributes, operation_of
from segue.server.frontend.tokenizer import ModelTokenizer, TooManyTokens
from segue.server.frontend.trace_context import TraceContext, passed_on, traceparent_of
from segue.server.http.readiness import readiness
from segue.server.messages.records import InnerSpan, Records, RequestRecord, Step
from segue.server.observe.integrity_report import NodeState, busy, process_facts
from segue.server.observe.logs import about
from segue.server.observe.metrics import CONTENT_TYPE, Inference, Metrics
from segue.server.settings.shared_config import AccessConfig

log = logging.getLogger("segue.frontend")

#: An ASGI application.
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

#: How soon a thread that weighs or decodes a body gives way to the event loop; else it keeps it waiting 5 ms
#: at each turn.
_SWITCH_S = 0.0005

T = TypeVar("T")
Generating = TypeVar("Generating", bound=GenerateFields)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIServerSettings:
    """The settings of the server.

    `defaults` are the sampling settings that a client does not name.
    `context_tokens` bounds prompts while no worker has said what it can take. Bodies above `inline_bytes` are
    tokenized in one of `tokenizer_threads` threads, so that the event loop keeps answering.
    """

    model: str
    context_tokens: int
    vocab_size: int
    limits: Limits
    defaults: SamplingDefaults = OPENAI
    access: AccessConfig = field(default_factory=AccessConfig)
    inline_bytes: int = 16 * 1024
    tokenizer_threads: int = 2
    body_timeout_s: float = 60.0
    stall_s: float = 30.0
    #: Time without a token after which a stream gets a comment; 0 never.
    quiet_s: float = 15.0
    #: How much later than the workers' own deadline the server itself gives up.
    grace_s: float = 1.0


class OpenAIServer:
    """All requests of one frontend."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: ModelTokenizer,
        settings: OpenAIServerSettings,
        metrics: Metrics,
        records: Records | None = None,
        trace: Callable[[str], TraceContext] = passed_on,
    ) -> None:
        self.backend = backend
        self.trace = trace
        self.records = Records() if records is None else records
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = metrics
        self.planner = Planner(tokenizer)
        self.memory = MemoryBudget(max(32 * settings.limits.max_body_bytes, MIN_BUDGET))
        # A number of thousands of digits takes as long as thousands of others.
        sys.set_int_max_str_digits(sys.int_info.str_digits_check_threshold)
        sys.setswitchinterval(_SWITCH_S)
        self._threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenize")
        self._in_threads = 0
        #: Why `/ready` is 503 while requests are still answered: the process is about to end.
        self.leaving = ""
        self._calls: set[HttpCall] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- what the process asks ------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """Requests that are being answered now."""
        return len(self._calls)

    async def idle(self) -> None:
        """Returns when no request is being answered."""
        await self._idle.wait()

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def card(self) -> ModelCard:
        """The model as it can be served now."""
        s = self.settings
        context = self.backend.context_tokens
        return ModelCard(
            name=s.model,
            context_tokens=s.context_tokens if context is None else context,
            vocab_size=s.vocab_size,
            defaults=s.defaults,
        )

    # ---- the boundary ---------------------------------------------------------------------------

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        endpoint: str,
        work: Callable[[HttpCall, float], Awaitable[None]],
    ) -> None:
        """Run `work` for one request; its failure becomes this request's answer and nothing else."""
        call = HttpCall(scope, receive, RequestMemory(self.memory), endpoint)
        call.trace = self.trace(traceparent_of(scope))
        try:
            await self._answer(call, work)
            await call.taken(stall_s=self.settings.stall_s)
        finally:
            call.held.set(0)

    async def _answer(self, call: HttpCall, work: Callable[[HttpCall, float], Awaitable[None]]) -> None:
        """See `serve`; the client may not have read its answer yet."""
        started = time.monotonic()
        self._calls.add(call)
        self._idle.clear()
        error: SegueError | None = None
        try:
            await work(call, started)
        except SegueError as failure:
            # Without its traceback, a cycle with this frame that keeps a refused body until it is collected.
            error = failure.with_traceback(None)
        except TimeoutError:
            error = DeadlineExceeded("the request's deadline passed", phase="frontend")
        except Exception as failure:
            # A bug in one request's handling is that request's error, and loud.
            log.exception("event=bug", extra=about(call.id))
            error = Internal(f"{type(failure).__name__} while answering; see the log for {call.id}")
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()
        if error is not None:
            call.held.set(0)
            await call.fail(error)
        self._record(call, error, started)

    def _record(self, call: HttpCall, error: SegueError | None, started: float) -> None:
        seconds, endpoint = time.monotonic() - started, call.endpoint
        code = error.info.code if error else None
        if call.gone:
            code = ErrorCode.ABORTED_BY_CLIENT
        name = "" if code is None else code.value
        if call.planned_at:
            self.records.put(_record_of(call, error, started, seconds))
            self.metrics.inference.labels(*self.inference(call), name).observe(seconds)
        self.metrics.finished(endpoint, code)
        self.metrics.http.labels(*call.http_labels(name)).observe(seconds)
        if code is not None and code is not ErrorCode.INVALID_REQUEST:
            text = error.info.text if error else ""
            parts = endpoint, call.status, seconds, code, text
            log.warning(_ANSWERED + " code=%s reason=%r", *parts, extra=about(call.id))
        else:
            log.info(_ANSWERED, endpoint, call.status, seconds, extra=about(call.id))

    def inference(self, call: HttpCall) -> Inference:
        """The labels of its inference."""
        return operation_of(call.endpoint), PROVIDER, self.settings.model

    async def read(self, call: HttpCall, kind: type[Body]) -> tuple[Body, bytes]:
        """The decoded body, and as it came."""
        raw = await self.receive(call)
        body, unknown = await self.off_loop(
            len(raw), lambda: (read_body(raw, kind), unknown_fields(raw, kind))
        )
        call.list_unknown(unknown)
        self.check_model(getattr(body, "model", None))
        if isinstance(body, GenerateFields):
            body = with_header_rank(call, body)
        return body, raw

    async def receive(self, call: HttpCall) -> bytes:
        """The body as it came, within the limits of bodies; what it takes to decode it is counted."""
        s = self.settings
        limit_bytes, most_bytes = s.limits.max_body_bytes, self.most_bytes()
        raw = await call.body(limit_bytes, call.held, timeout_s=s.body_timeout_s)
        if (encoding := (call.header(b"content-encoding") or "identity").strip().lower()) != "identity":
            packed = raw
            raw = await self.off_loop(limit_bytes, lambda: unpacked(packed, encoding, limit_bytes))
            call.held.set(len(raw))

        def weighed() -> int:
            decoded = decoded_bytes(raw, most_bytes)
            check_levels(raw)
            return decoded

        call.held.add(await self.off_loop(len(raw), weighed))
        return raw

    def most_bytes(self) -> int:
        """Limit of the memory of one decoded body, or of the ids that `/tokenize` gives."""
        least, context = self.memory.limit_bytes // 8, self.card().context_tokens
        return max(least, 8 * TOKEN_BYTES * context)

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModel if a client asks for another model than this server's."""
        if name is not None and name != self.settings.model:
            raise UnknownModel(f"the model {name[:200]!r} does not exist; this is {self.settings.model!r}")

    async def off_loop(self, nbytes: int, work: Callable[[], T], *, last: bool = False) -> T:
        """`work` here if it is small, else in a thread, of which a bounded number may wait; the `last` work
        of a request that is otherwise done is never refused."""
        if nbytes <= self.settings.inline_bytes:
            return work()
        if self._in_threads >= self.settings.limits.max_queue and not last:
            raise OutOfCapacity("too many prompts are being tokenized")
        self._in_threads += 1
        # A request that ends meanwhile leaves nothing in the threads' queue.
        todo = [work]
        del work
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: todo.pop()())
        finally:
            todo.clear()
            self._in_threads -= 1

    # ---- generations ----------------------------------------------------------------------------

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """OpenAI chat."""

        async def work(call: HttpCall, started: float) -> None:
            # Without names here: the body is to be gone once its prompt's ids are known.
            await self.generation(call, started, *await self.read(call, ChatBody), self.planner.chat)

        await self.serve(scope, receive, send, "chat", work)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """OpenAI text completions."""

        async def work(call: HttpCall, started: float) -> None:
            await self.generation(
                call, started, *await self.read(call, CompletionBody), self.planner.completion
            )

        await self.serve(scope, receive, send, "completions", work)

    async def responses(self, scope: Scope, receive: Receive, send: Send) -> None:
        """OpenAI Responses, without state on the server."""

        async def work(call: HttpCall, started: float) -> None:
            await self.generation(call, started, *await self._as_chat(call, ResponsesBody, *_RESPONSES))

        await self.serve(scope, receive, send, "responses", work)

    async def messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Anthropic Messages."""

        async def work(call: HttpCall, started: float) -> None:
            await self.generation(call, started, *await self._as_chat(call, MessagesBody, *_MESSAGES))

        await self.serve(scope, receive, send, "messages", work)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The tokens of a message's prompt."""

        async def work(call: HttpCall, started: float) -> None:
            plan = await self.plan(call, *await self._as_chat(call, MessagesBody, *_COUNTED))
            await call.answer(200, {"input_tokens": len(plan.samples[0].request.prompt)})

        await self.serve(scope, receive, send, "count_tokens", work)

    async def _as_chat(
        self,
        call: HttpCall,
        kind: type[Body],
        chat_of: Callable[[Body], TranslatedChat],
        answer_of: Callable[[Plan, Body], Plan],
        names: Mapping[str, str],
    ) -> tuple[ChatBody, bytes, Callable[[ChatBody, ModelCard, str], Plan]]:
        """A body of another API as a chat, and the plan that answers it in its own form. Errors call fields
        of the chat by their `names` in that API."""
        body, raw = await self.read(call, kind)
        translated = await self.off_loop(len(raw), lambda: chat_of(body))
        call.list_unknown(translated.left_out)
        chat = with_header_rank(call, translated.chat)
        del translated

        def make(chat: ChatBody, card: ModelCard, call_id: str) -> Plan:
            try:
                plan = self.planner.chat(chat, card, call_id)
            except BadParam as error:
                raise renamed(error, names) from None
            plan.ignored = [names.get(name, name) for name in plan.ignored]
            return answer_of(plan, body)

        return chat, raw, make

    async def generation(
        self,
        call: HttpCall,
        started: float,
        body: Generating,
        raw: bytes,
        make: Callable[[Generating, ModelCard, str], Plan],
    ) -> None:
        """Answer a body that asks for tokens, and that came as `raw`."""
        async with call:
            plan = await self.plan(call, body, raw, make)
            del body, raw, make
            await self.run(call, plan, started, self.backend)

    async def plan(
        self,
        call: HttpCall,
        body: Generating,
        raw: bytes,
        make: Callable[[Generating, ModelCard, str], Plan],
    ) -> Plan:
        """The generations to run for `body`; the caller should drop `body` afterwards. Raises BadParam."""
        counts = self.settings.access.client_order
        trusted = counts == "all" or (counts == "keys" and call.has_key)
        card, (priority, tenant) = self.card(), waiting_order(body, call.owner.tenant, trusted=trusted)
        salt = cache_salt(body, call.owner.cache_domain)
        made = await self.off_loop(len(raw), lambda: make(body, card, call.id))
        call.list_unknown(made.ignored)
        check_repeated(made.answer.repeated_bytes)
        for sample in made.samples:
            sample.request = msgspec.structs.replace(
                sample.request, priority=priority, tenant=tenant, cache_salt=salt
            )
        call.held.set(made.held_bytes)
        return made

    def budget_s(self, started: float) -> float:
        """The rest of a request's time. DeadlineExceeded if it has passed."""
        left_s = self.settings.limits.request_budget_s - (time.monotonic() - started)
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before it was placed", phase="frontend")
        return left_s

    async def run(
        self,
        call: HttpCall,
        plan: Plan,
        started: float,
        backend: Generator,
        more: dict[str, object] | None = None,
        instead: dict[str, object] | None = None,
    ) -> None:
        """Generate on `backend` and answer; `more` are fields that a whole answer has besides, `instead`
        takes its place."""
        budget_s = self.budget_s(started)
        call.planned_at = time.monotonic()
        if call.trace.child:
            for sample in plan.samples:
                sample.request = msgspec.structs.replace(sample.request, traceparent=call.trace.child)
        meter = Meter(self.metrics, time.monotonic, started, self.inference(call))
        if call.trace.span:
            call.inference = partial(inference_attributes, operation_of(call.endpoint), plan, call.planned_at)
        async with asyncio.timeout(budget_s + self.settings.grace_s):
            if plan.stream:
                await self._stream(call, plan, meter, budget_s, backend)
                return
            answer = plan.answer

            def add(index: int, piece: Piece) -> None:
                call.held.add(piece.nbytes)
                answer.add(index, piece)

            await generate(backend, plan.samples, meter, add, budget_s=budget_s)
            if instead is not None:
                await call.answer(200, instead)
                return
            raw = await self.off_loop(
                call.held.nbytes - plan.held_bytes + answer.repeated_bytes + answer.kept_bytes,
                lambda: msgspec.json.encode(answer.whole() | more if more else answer.whole()),
                last=True,
            )
            await call.answer(200, msgspec.Raw(raw))

    async def _stream(
        self, call: HttpCall, plan: Plan, meter: Meter, budget_s: float, backend: Generator
    ) -> None:
        settings = self.settings
        answer, stream = plan.answer, call.stream(stall_s=settings.stall_s, quiet_s=settings.quiet_s)
        call.failed = answer.failed

        def take(index: int, piece: Piece) -> Wait | None:
            if answer.keeps_streamed:
                call.held.add(piece.nbytes)
            return stream.events(answer.events(index, piece))

        try:
            await generate(backend, plan.samples, meter, take, budget_s=budget_s)
            await stream.end(answer.usage_event() if plan.include_usage else b"")
        finally:
            stream.close()

    # ---- small endpoints ------------------------------------------------------------------------

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Text or messages to token ids."""

        async def work(call: HttpCall, started: float) -> None:
            body, raw = await self.read(call, TokenizeBody)
            context, most = self.card().context_tokens, self.most_bytes() // TOKEN_BYTES
            ids = await self.off_loop(len(raw), lambda: self._tokens_of(body, most))
            call.held.add(TOKEN_BYTES * len(ids))
            answer = {"count": len(ids), "max_model_len": context, "tokens": ids}
            await call.answer(
                200, msgspec.Raw(await self.off_loop(len(raw), lambda: msgspec.json.encode(answer)))
            )

        await self.serve(scope, receive, send, "tokenize", work)

    def _tokens_of(self, body: TokenizeBody, most: int) -> list[int]:
        try:
            return self._encoded(body, most)
        except TooManyTokens as found:
            raise RequestTooLarge(f"the text has {found} tokens; /tokenize gives at most {most}") from None

    def _encoded(self, body: TokenizeBody, most: int) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise BadParam("either prompt or messages is needed", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            return self.tokenizer.encode(body.prompt, special=special, most=most)
        assert body.messages is not None
        tools = [shown_tool(tool) for tool in body.tools or []]
        prompt = chat_prompt(
            self.tokenizer,
            body.messages,
            tools or None,
            generation_prompt=body.add_generation_prompt,
            continue_final=bool(body.continue_final_message),
            variables=body.chat_template_kwargs,
            most=most,
        )
        return prompt.ids

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Token ids to text."""

        async def work(call: HttpCall, started: float) -> None:
            body, raw = await self.read(call, DetokenizeBody)
            answer = await self.off_loop(len(raw), lambda: self._text_of(body.tokens))
            call.held.add(len(answer))
            await call.answer(200, msgspec.Raw(answer))

        await self.serve(scope, receive, send, "detokenize", work)

    def _text_of(self, tokens: list[int]) -> bytes:
        """The answer with the text of `tokens`. Raises RequestTooLarge if a body could not hold it."""
        size, most = self.settings.vocab_size, self.settings.limits.max_body_bytes
        for token in tokens:
            if not 0 <= token < size:
                raise BadParam(f"tokens: token {token} is not in the vocabulary of {size}", "tokens")
        texts: list[str] = []
        chars = 0
        for text in decode_in_pieces(self.tokenizer, tokens, skip_special=False):
            texts.append(text)
            chars += len(text)
            if chars > most:
                raise RequestTooLarge(f"the text has more than {most} characters; send fewer tokens")
        return msgspec.json.encode({"prompt": "".join(texts)})

    def model_object(self) -> dict[str, object]:
        card = self.card()
        return model_object(card.name, card.context_tokens)

    async def models(self, request: HttpRequest) -> Response:
        """The served model and its context."""
        return self._json(request, {"object": "list", "data": [self.model_object()]})

    async def model(self, request: HttpRequest) -> Response:
        """The same of one name."""
        return model_of(request, self.model_object())

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        """The tokenizer: templates, special tokens, sizes."""
        return self._json(request, self.tokenizer.info() | {"max_model_len": self.card().context_tokens})

    async def load(self, request: HttpRequest) -> Response:
        """Requests that are being answered."""
        return self._json(request, {"server_load": self.calls})

    async def openapi(self, request: HttpRequest) -> Response:
        """This list, for programs."""
        return self._json(request, document(OPERATIONS, __version__))

    async def docs(self, request: HttpRequest) -> Response:
        """This list, for people."""
        return HTMLResponse(page(OPERATIONS, __version__))

    async def health(self, request: HttpRequest) -> Response:
        """200 while the process is alive."""
        return self._json(request, {"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        """200 once a generation has passed through the current workers."""
        status, body = readiness(self._lacking())
        return self._json(request, body, status)

    def _lacking(self) -> str:
        """Why no new client should come here now; empty: it may."""
        if self.leaving or not self.backend.can_serve:
            return self.leaving or self.backend.lacking().info.text
        return "" if self.backend.proven else "no request has completed on the workers that are here"

    async def integrity(self, request: HttpRequest) -> Response:
        """Counts of this process."""
        tables = {"calls": self.calls, "bodies": self.memory.used_bytes, **self.backend.sizes()}
        descriptors, segments, rss_bytes = process_facts()
        state = NodeState(
            role="frontend",
            incarnation="",
            at_rest=not busy(tables),
            problems=[f"{name} is negative: {count}" for name, count in tables.items() if count < 0],
            tables=tables,
            sessions=[],
            descriptors=descriptors,
            segments=segments,
            rss_bytes=rss_bytes,
        )
        return self._json(request, msgspec.to_builtins(state))

    async def version(self, request: HttpRequest) -> Response:
        """The version."""
        return self._json(request, {"version": __version__})

    async def scrape(self, request: HttpRequest) -> Response:
        """Prometheus text."""
        self.metrics.ready.set(not self._lacking())
        return Response(self.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    def _json(self, request: HttpRequest, body: object, status: int = 200) -> Response:
        headers = {"x-request-id": request_id_of(request.scope)}
        if status == 503:
            headers["retry-after"] = "1"
        return JSONResponse(body, status, headers=headers)


def _record_of(call: HttpCall, error: SegueError | None, started: float, seconds: float) -> RequestRecord:
    """One HTTP request that was placed, whole; its samples have records of their own."""
    return RequestRecord(
        request_id=call.id,
        where="frontend http",
        role="http",
        began=started,
        seconds=seconds,
        steps=[Step(f"read {call.endpoint}", 0.0), Step("generate", call.planned_at - started)],
        facts={"status": call.status},
        error=error.info if error is not None else _GONE if call.gone else None,
        traceparent=call.trace.parent,
        span=call.trace.span,
        tenant=call.owner.tenant,
        attributes=call.http_attributes() if call.trace.span else {},
        inner=_inference(call, call.planned_at - started),
    )


def _inference(call: HttpCall, at_s: float) -> InnerSpan | None:
    if call.inference is None:
        return None
    attributes = call.inference()
    name = f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"
    return InnerSpan(span=call.trace.child, name=name, at_s=at_s, attributes=attributes)


def _as_response(plan: Plan, body: ResponsesBody) -> Plan:
    return replace(plan, answer=ResponsesAnswer(plan.answer, body), include_usage=True)


def _as_message(plan: Plan, body: MessagesBody) -> Plan:
    if body.max_tokens is None or body.max_tokens < 1:
        raise BadParam("max_tokens: a number from 1 on is needed", "max_tokens")
    return at_most(replace(plan, answer=MessagesAnswer(plan.answer), include_usage=True), body.max_tokens)


#: Translations of other APIs, for `_as_chat`.
_RESPONSES: Final = (chat_of_responses, _as_response, RESPONSES_NAMES)
_MESSAGES: Final = (chat_of_messages, _as_message, MESSAGES_NAMES)
_COUNTED: Final = (chat_of_messages, lambda plan, body: plan, MESSAGES_NAMES)
#: The line of each answer in the log.
_ANSWERED: Final = "event=answered endpoint=%s status=%d seconds=%.3f"
_GONE = AbortedByClient("the client left").info


def with_header_rank(call: HttpCall, body: Generating) -> Generating:
    """`body` with the DP rank that the request's header names, which comes before the body's."""
    rank = call.header(b"x-data-parallel-rank")
    return body if rank is None else msgspec.structs.replace(body, routed_dp_rank=header_rank(rank))


class Asgi:
    """A method of `OpenAIServer` as an ASGI application, which Starlette routes to without a wrapper."""

    def __init__(self, handler: AsgiApp) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope, receive, send)


#: The endpoints; the dashboard has routes of its own.
OPERATIONS: Final = (
    Operation("/v1/chat/completions", "POST", OpenAIServer.chat, ChatBody),
    Operation("/v1/completions", "POST", OpenAIServer.completions, CompletionBody),
    Operation("/v1/responses", "POST", OpenAIServer.responses, ResponsesBody),
    Operation("/v1/messages", "POST", OpenAIServer.messages, MessagesBody),
    Operation("/v1/messages/count_tokens", "POST", OpenAIServer.count_tokens, MessagesBody),
    Operation("/tokenize", "POST", OpenAIServer.tokenize, TokenizeBody),
    Operation("/detokenize", "POST", OpenAIServer.detokenize, DetokenizeBody),
    Operation("/v1/models", "GET", OpenAIServer.models),
    Operation("/v1/models/{name:path}", "GET", OpenAIServer.model),
    Operation("/tokenizer_info", "GET", OpenAIServer.tokenizer_info),
    Operation("/load", "GET", OpenAIServer.load),
    Operation("/", "GET", OpenAIServer.health),
    Operation("/health", "GET", OpenAIServer.health),
    Operation("/ready", "GET", OpenAIServer.ready),
    Operation("/version", "GET", OpenAIServer.version),
    Operation("/integrity", "GET", OpenAIServer.integrity),
    Operation("/metrics", "GET", OpenAIServer.scrape),
    Operation("/dashboard", "GET", "the fleet, live, as a page"),
    Operation("/dashboard/events", "GET", "what the page shows: JSON, as server-sent events"),
    Operation("/dashboard/requests/{name:path}", "GET", "the timeline of one request"),
    Operation("/openapi.json", "GET", OpenAIServer.openapi),
    Operation("/docs", "GET", OpenAIServer.docs),
)


def handlers(api: OpenAIServer, method: str) -> dict[str, Any]:
    """The handler of each endpoint of `api` with this method, by its path."""
    found = [(o.path, o.handler) for o in OPERATIONS if o.method == method and not isinstance(o.handler, str)]
    return {path: getattr(api, handler.__name__) for path, handler in found}


def build_app(api: OpenAIServer, keys: ApiKeys | None = None, more: Sequence[BaseRoute] = ()) -> AsgiApp:
    """The application; its routes are those of docs/http.md, of which `more` are made by others. With `keys`
    clients must show one of them."""
    posts: dict[str, AsgiApp] = handlers(api, "POST")
    routes = [Route(path, Asgi(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in handlers(api, "GET").items()]
    rest = Starlette(routes=[*routes, *more], exception_handlers=HANDLERS)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # The most frequent requests skip Starlette's layers.
        found = posts.get(scope["path"], rest) if scope["method"] == "POST" else rest
        await found(scope, receive, send)

    return KeyCheck(app, keys, api.metrics) if keys else app


__all__ = ["OPERATIONS", "Asgi", "OpenAIServer", "OpenAIServerSettings", "build_app", "handlers"]
