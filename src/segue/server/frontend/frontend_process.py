"""The frontend as a process: bind, serve, prove, drain."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from segue.engine.models.model_registry import ModelFamily, family_of
from segue.engine.request import Request, SamplingParams
from segue.kv import ConfigError, ErrorCode, ErrorInfo, SegueError
from segue.kv.session import Backoff, awaited, background, is_loopback
from segue.server.frontend.app import OpenAIServer, OpenAIServerSettings, build_app
from segue.server.frontend.backend import Backend
from segue.server.frontend.dashboard import Dashboard
from segue.server.frontend.frontend_listener import FrontendListener
from segue.server.frontend.keys import ApiKeys
from segue.server.frontend.sampling_defaults import OPENAI, of_model
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.trace_context import TraceContext, passed_on
from segue.server.messages.records import Records
from segue.server.observe.metrics import Metrics
from segue.server.settings.commands import FrontendConfig

log = logging.getLogger("segue.frontend")


async def run_frontend(
    config: FrontendConfig,
    backend: Backend,
    metrics: Metrics,
    stop: asyncio.Event,
    *,
    model_folder: Path,
    served_model: str,
    keys: ApiKeys,
    records: Records | None = None,
    trace: Callable[[str], TraceContext] = passed_on,
    listener: FrontendListener | None = None,
    dashboard: Dashboard | None = None,
    on_listening: Callable[[str], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve what `backend` generates until `stop` is set, and then for `--shutdown-delay-s` with `/ready` at
    503 if it ever was ready. Then drain: new requests get 503, running ones have `--drain-s`. Starts
    `backend` and closes it; `metrics` and `records` are the process's, `trace` makes a request's trace
    context of the client's. `model_folder` holds the tokenizer and `config.json`. Without `keys` everybody
    who can reach the port may ask. `listener` is the port if it is open already; it is closed at the end.

    `on_listening` and `on_ready` are called once with the URL: when requests are placed, and when the first
    canary has succeeded. Raises ConfigError before anything is served. Cancelling ends at once.
    """
    drain_s = config.limit.drain_s
    listener = listener or FrontendListener(
        config.host,
        config.port,
        drain_s=drain_s,
        keys=keys,
        metrics=metrics,
        clients=config.clients,
        hosts=config.access.hosts,
    )
    try:
        listener.reason = "the frontend is loading the tokenizer"
        tokenizer = await asyncio.to_thread(ModelTokenizer.load, model_folder)
        log.info("event=tokenizer_loaded folder=%s", model_folder)
        context_tokens, vocab_size = model_bounds(model_folder, tokenizer)
        own = config.answers.sampling_defaults == "model"
        defaults = of_model(model_folder, vocab_size) if own else OPENAI
        values = " ".join(f"{name}={value:g}" for name, value in asdict(defaults).items())
        log.info("event=sampling_defaults source=%s %s", config.answers.sampling_defaults, values)
        settings = OpenAIServerSettings(
            model=served_model,
            context_tokens=context_tokens,
            vocab_size=vocab_size,
            limits=config.limit.limits(),
            defaults=defaults,
            access=config.access,
            quiet_s=config.clients.stream_comment_s,
        )
        api = OpenAIServer(backend, tokenizer, settings, metrics, records, trace)
    except BaseException:
        await listener.close()
        raise
    if not keys and not is_loopback(config.host):
        log.warning(
            "--host %s without an API key: everybody who can reach port %s may use this server; "
            "give --api-key-file",
            config.host,
            listener.url.rpartition(":")[2],
        )
    listener.open(build_app(api, keys, () if dashboard is None else dashboard.routes()))
    url = listener.url
    backend.start()
    canary = tokenizer.encode("Hello", special=True)[:8] or [0]
    proving = awaited(keep_proving(backend, canary), name="canary")
    unannounced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ready = asyncio.Event()

    def announce(url: str) -> None:
        ready.set()
        if on_ready is not None:
            on_ready(url)

    announcing = background(
        _announce(backend, url, announce), name="announcing", failed=unannounced.set_exception
    )
    stopping = awaited(stop.wait(), name="stop")
    try:
        if on_listening is not None:
            on_listening(url)
        # A server or a canary loop that dies takes the process with it: a dead part is not hidden.
        ends: set[asyncio.Future[Any]] = {listener.serving, proving, stopping, unannounced}
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
        if config.clients.shutdown_delay_s and ready.is_set():
            api.leaving = "this frontend ends soon; ask another"
            log.info("event=leaving serves_on_s=%g", config.clients.shutdown_delay_s)
            ends.remove(stopping)
            done, _ = await asyncio.wait(
                ends, timeout=config.clients.shutdown_delay_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        await _drain(backend, api, drain_s)
    finally:
        for task in (proving, announcing, stopping):
            task.cancel()
        await asyncio.gather(proving, announcing, stopping, return_exceptions=True)
        if dashboard is not None:
            await dashboard.close()
        await backend.close()
        await listener.close()
        api.close()


async def _announce(backend: Backend, url: str, on_ready: Callable[[str], None]) -> None:
    while not (backend.can_serve and backend.proven):
        await backend.changed()
    log.info("ready %s", url)
    on_ready(url)


async def keep_proving(backend: Backend, prompt: list[int], *, budget_s: float = 30.0) -> None:
    """Run a canary whenever somebody could serve and nothing has proven it; never returns.

    Two tokens: the second is made by decode from the KV that was handed over.
    """
    backoff = Backoff(0.2)
    for number in itertools.count():
        while not backend.can_serve or backend.proven:
            backoff.reset()
            await backend.changed()
        try:
            await _canary(backend, f"canary-{number}", prompt, budget_s)
        except SegueError as error:
            log.warning("the canary failed: %s", error)
            await asyncio.sleep(backoff.next_s())


async def _canary(backend: Backend, request_id: str, prompt: list[int], budget_s: float) -> None:
    params = SamplingParams(max_tokens=2, min_tokens=2, temperature=0.0, ignore_eos=True)
    request = Request(request_id=request_id, prompt=prompt, sampling=params)
    try:
        await backend.submit(request, budget_s=budget_s).deliver(lambda _: None)
    finally:
        # Ignored after a proper end.
        backend.cancel(request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="the canary ended"))


async def _drain(backend: Backend, api: OpenAIServer, drain_s: float) -> None:
    backend.drain()
    log.info("draining: %d requests are being answered", api.calls)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await api.idle()
    if api.calls:
        log.warning("%d requests did not end within %.0f s and are ended now", api.calls, drain_s)


def model_bounds(folder: Path, tokenizer: ModelTokenizer) -> tuple[int, int]:
    """Tokens of context and of the vocabulary as `config.json` says; workers report their own bounds later.
    Raises ConfigError."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a model's configuration")
    text = raw.get("text_config")
    raw = {**raw, **text} if isinstance(text, dict) else raw
    context = raw.get("max_position_embeddings") or raw.get("n_positions") or 0
    if not isinstance(context, int) or context < 1:
        raise ConfigError(f"{path} does not say how long a context may be (max_position_embeddings)")
    vocab = raw.get("vocab_size")
    family = family_of(raw) or ModelFamily()
    context = family.context_tokens({**raw, "max_position_embeddings": context})
    return context, max(tokenizer.vocab_size, vocab if isinstance(vocab, int) else 0)
