"""Runs `serve`, `prefill`, `decode`, `unified` and `frontend` after their settings are read."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from segue.cli import flags
from segue.cli.commands.models import located, model_size, resolve
from segue.engine.cpu.processor import this_processor
from segue.engine.model_names import served_name
from segue.kv import ConfigError, Internal, Limits, OutOfCapacity, Role, SegueError
from segue.kv.session import EventLoop, Tls, tls_from_files
from segue.server.frontend.keys import read_keys
from segue.server.instance.gc import frozen_imports
from segue.server.instance.host import this_host
from segue.server.observe import logs
from segue.server.settings.commands import FrontendConfig, InstanceConfig, ServeConfig
from segue.server.settings.layers import argv, nearest
from segue.server.settings.registry_address import bracket
from segue.server.settings.shared_config import AccessConfig
from segue.server.supervisor import service_manager
from segue.server.supervisor.console import Console
from segue.server.supervisor.dp_rank_processes import RankProcesses
from segue.server.supervisor.lifeline import CannotStart, Lifeline, Ready
from segue.server.supervisor.local_deployments import announced, announced_instance
from segue.server.supervisor.process_tree import MARGIN_S, THREAD_VARIABLES, ServeResult
from segue.server.supervisor.supervisor import Supervisor, check_port

log = logging.getLogger("segue.cli")

NO_MEMORY = "out of memory; give a lower --kv-gib, fewer instances, or a --dtype with fewer bytes"
#: Where the parts of `segue serve` find each other.
LOOPBACK = "127.0.0.1"
#: Addresses to listen at, and where this host reaches them.
WILDCARDS = {"0.0.0.0": LOOPBACK, "::": "::1"}


def serve_command(args: argparse.Namespace) -> int:
    """Run a deployment with the settings of `args`."""
    return serve(flags.with_secret(flags.load(ServeConfig, "serve", args)))


def serve(config: ServeConfig) -> int:
    """Run a deployment until a signal; the exit status."""
    console = Console(log_format=config.log.log_format)
    status = 1
    try:
        logs.configure(config.log, "serve", console)
        with _interruptible():
            status, reason = _serve(config, console)
    except KeyboardInterrupt:  # before anything was started; afterwards the supervisor hears of signals
        status, reason = 1, "stopped while loading: nothing was started, and nothing was served"
    finally:
        console.close()
        logs.configure(config.log, "serve")
    if reason:
        logs.say(reason)
    return status


def _serve(config: ServeConfig, console: Console) -> tuple[int, str]:
    check_transport(config.transport)
    check_port(config.host, config.port)
    host = this_host()
    config.check_memory(host)
    tls = tls_from_files(config.tls, LOOPBACK)
    keys = read_keys(config.access)
    config = dataclasses.replace(config, model=located(config.model))
    path = resolve(config.model, config.engine.cache, config.engine.revision)
    name = served_name(config.model, config.engine.served_model_name)
    engine = dataclasses.replace(config.engine, served_model_name=name, dtype=_dtype(config.engine.dtype))
    size = model_size(path, engine.dtype)
    config = dataclasses.replace(config, model=str(path), engine=engine)
    logs.event(log, "config", **config.derived(host, size))

    listed = contextlib.ExitStack()

    def announce(url: str, registry: str, secret_file: str) -> None:
        list_deployment(listed, config, url, name, registry, secret_file)
        announce_ready(console, url, name, config.access if keys else None, config.clients.https_cert)

    async def run() -> ServeResult:
        return await Supervisor(
            config,
            host=host,
            size=size,
            command=child_command,
            registry=lambda secret: run_registry(config.bootstrap_port, secret, config.limit.limits(), tls),
            announce=announce,
            keys=keys,
            console=console,
        ).run()

    with listed:
        outcome = asyncio.run(run())
    return outcome.status, outcome.reason


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A SIGTERM is a KeyboardInterrupt, as a SIGINT is, while nobody else handles it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_transport(setting: str) -> None:
    """Raise a ConfigError for a transport that does not exist, or that was named and cannot work here."""
    from segue.kv import KINDS, USABLE
    from segue.kv.transport.kinds import AUTO_TRANSPORT

    named = [name for name in setting.split(",") if name != AUTO_TRANSPORT]
    found = KINDS.available() if named else {}
    for name in named:
        reason = found.get(name)
        if reason is None:
            raise ConfigError(f"--transport {name} does not exist{nearest(name, found)}; see segue doctor")
        if reason != USABLE:
            raise ConfigError(
                f"--transport {name} cannot be used here: {reason}; use auto, or see segue doctor"
            )


@contextlib.asynccontextmanager
async def run_registry(port: int, secret: bytes, limits: Limits, tls: Tls | None) -> AsyncIterator[str]:
    """The URL of a registry that runs in this process at loopback's `port` while this is open."""
    from segue.server.registry.registry_server import serve as start

    server = await start(LOOPBACK, port, secret=secret, limits=limits, tls=tls)
    logs.event(log, "registry_runs", url=server.url)
    try:
        yield server.url
    finally:
        await server.close()


def child_command(role: Role, config: InstanceConfig | FrontendConfig) -> Sequence[str]:
    """The command line of a child with `config`."""
    return [sys.executable, "-m", "segue.cli.main", str(role), *argv(config)]


def list_deployment(
    listed: contextlib.ExitStack,
    config: ServeConfig | FrontendConfig,
    url: str,
    model: str,
    registry: str,
    secret_file: str | None,
) -> None:
    """Let `segue ps` and the like of this user find a deployment until `listed` is closed."""
    try:
        listed.enter_context(
            announced(
                url,
                model,
                registry,
                secret_file,
                config.tls,
                api_key_file=config.access.api_key_file,
                https_cert=config.clients.https_cert,
            )
        )
    except (OSError, ConfigError) as exc:
        secret = "" if secret_file is None else f" --secret-file {secret_file}"
        log.warning(
            "segue ps does not find this deployment: %s; give it --registry %s%s", exc, registry, secret
        )


def announce_ready(
    console: Console, url: str, model: str, access: AccessConfig | None, https_cert: str | None = None
) -> None:
    """Print a request to try, without a key in it: a terminal's history and logs must not contain one. It
    trusts the server's own certificate, which may have no authority."""
    shown = ""
    if access is not None:
        key = "$SEGUE_API_KEY"
        if access.api_key is None and access.api_key_file is not None:
            key = f"$(grep -m1 '^[^#]' {shlex.quote(access.api_key_file)})"
        shown = f' -H "Authorization: Bearer {key}"'
    question = {"role": "user", "content": "What is the capital of France?"}
    body = shlex.quote(json.dumps({"model": model, "temperature": 0, "messages": [question]}))
    trust = "" if https_cert is None else f"--cacert {shlex.quote(https_cert)} "
    console.say(
        f"try: curl {trust}{url}/v1/chat/completions{shown} -H 'content-type: application/json' -d {body}"
    )
    start = shlex.quote(sys.argv[0])
    if sys.argv[0].endswith(".py"):
        start = f"{shlex.quote(sys.executable)} -m segue.cli.main"
    console.say(f"look: {start} ps")
    console.announce(f"ready {url}")
    service_manager.ready(url)


def instance(args: argparse.Namespace) -> int:
    """Run one instance in the role that the command names, until a signal; the exit status."""
    role = Role(args.command)
    lifeline = Lifeline(args.lifeline_fd, args.report_fd)

    def run() -> int:
        config = flags.with_secret(flags.load(InstanceConfig, role, args, role=role))
        logs.configure(config.log, "" if lifeline.supervised else config.label)
        lifeline.watch(config.limit.drain_s + MARGIN_S)
        check_transport(config.transport)
        threads = config.engine.threads(this_host(), config.leaders * config.size.ranks)
        # Before torch is loaded: its thread pools take their size from here.
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
        from segue.server.instance.registry_link import registry_of

        with registry_of(config) as found, contextlib.ExitStack() as listed:
            if found is None:
                log.info("event=stopped_before_the_registry_was_there")
                return 0
            found = _located(found, threads, _dtype(found.engine.dtype, quiet=lifeline.supervised))
            if found.leaders > 1:
                return serve_ranks(found, lifeline, listed)
            from segue.server.instance.role_lifecycle import run_instance

            def serving(now: InstanceConfig, url: str, door: str) -> None:
                if not lifeline.supervised:
                    logs.configure(now.log, now.label)  # it may have been switched
                    list_instance(listed, now, [url])
                report_ready(lifeline, now.label, url, now.role, door)

            return run_instance(found, on_ready=serving, supervised=lifeline.supervised)

    return run_child(lifeline, run)


def list_instance(listed: contextlib.ExitStack, config: InstanceConfig, urls: Sequence[str]) -> None:
    """Let `segue drain --self` find an instance with leaders at `urls` until `listed` is closed."""
    addresses = []
    for url in urls:
        host, _, port = url.rpartition(":")
        if config.tls.enabled:  # its certificate is for this one
            host = config.peer_host
        elif host in WILDCARDS:
            host = WILDCARDS[host]
        addresses.append(f"{bracket(host)}:{port}")
    try:
        listed.enter_context(announced_instance(addresses, config.secret_file, config.tls))
    except (OSError, ConfigError) as exc:
        log.info("segue drain --self does not find this instance: %s", exc)


def serve_ranks(config: InstanceConfig, lifeline: Lifeline, listed: contextlib.ExitStack) -> int:
    """Run each DP rank of an instance in a process of its own; the exit status."""
    console = Console(log_format=config.log.log_format)
    logs.configure(config.log, "" if lifeline.supervised else config.label, console)

    async def run() -> ServeResult:
        def say(urls: str) -> None:
            list_instance(listed, config, urls.split(","))
            report_ready(lifeline, config.label, urls, say=console.announce)

        return await RankProcesses(config, child_command, say, console=console).run()

    outcome = asyncio.run(run())
    if outcome.reason:
        logs.say(outcome.reason)
    return outcome.status


def _dtype(setting: str, *, quiet: bool = False) -> str:
    """The type that `--dtype` stands for on this processor; says which and why, unless the supervisor of this
    process has said it."""
    processor = this_processor()
    dtype = processor.dtype(setting)
    if not quiet:
        logs.event(log, "dtype", dtype=dtype, setting=setting, reason=processor.reason)
        if processor.is_slow(dtype):
            log.warning(
                "--dtype %s is slow here: this processor does not multiply it (%s); "
                "--dtype float32, given to every instance of the fleet, is faster",
                dtype,
                processor.found,
            )
    return dtype


def _located(config: InstanceConfig, threads: int, dtype: str) -> InstanceConfig:
    """`config` with the folder of its model, its type, and the memory and threads of each of its leaders."""
    host = this_host()
    config.check_memory(host)
    config = dataclasses.replace(config, model=located(config.model))
    path = resolve(config.model, config.engine.cache, config.engine.revision)
    size = model_size(path, dtype)
    engine = dataclasses.replace(
        config.engine,
        dtype=dtype,
        served_model_name=config.served_model,
        threads_per_worker=threads,
        kv_gib=config.kv_bytes(host, size) / 2**30,
        revision=None,  # by now the model is a path
    )
    logs.event(log, "config", **config.derived(host, size))
    return dataclasses.replace(config, model=str(path), engine=engine)


def frontend(args: argparse.Namespace) -> int:
    """Run the HTTP server until a signal; the exit status."""
    lifeline = Lifeline(args.lifeline_fd, args.report_fd)

    def run() -> int:
        config = flags.with_secret(flags.load(FrontendConfig, "frontend", args))
        logs.configure(config.log, "" if lifeline.supervised else config.label)
        lifeline.watch(config.clients.shutdown_delay_s + config.limit.drain_s + MARGIN_S)
        if not lifeline.supervised:
            check_port(config.host, config.port)
        logs.event(log, "config", **config.derived())
        with frozen_imports():
            from segue.cli.commands.frontend import run as serve_http

        try:
            with contextlib.ExitStack() as listed:

                def ready(url: str) -> None:
                    if not lifeline.supervised:
                        model = config.model or ""
                        list_deployment(listed, config, url, model, config.registry, config.secret_file)
                    report_ready(lifeline, config.label, url)

                with asyncio.Runner(loop_factory=EventLoop) as runner:
                    loaded = runner.run(serve_http(config, ready, lifeline))
        except asyncio.CancelledError:
            log.warning("event=stopped_at_once")
            return 1
        if not loaded:
            log.info("event=stopped_while_loading")
            sys.stdout.flush()
            os._exit(0)  # the thread that imports must not run on while the interpreter takes itself down
        return 0

    return run_child(lifeline, run)


def report_ready(
    lifeline: Lifeline,
    label: str,
    url: str,
    role: Role | None = None,
    door: str = "",
    say: Callable[[str], None] | None = None,
) -> None:
    """Tell the supervisor, or the person or the service manager who started this process."""
    service_manager.ready(url or label)
    if lifeline.supervised:
        lifeline.report(Ready(url, role, door))
    elif say is not None:
        say(f"ready {url or label}")
    else:
        print(f"ready {url or label}", flush=True)


def run_child(lifeline: Lifeline, run: Callable[[], int]) -> int:
    """Run a process's work; a failure to start is reported to the supervisor in one sentence."""
    try:
        return run()
    except SegueError as exc:
        if not lifeline.supervised:
            raise
        status = 2 if isinstance(exc, ConfigError) else 1
        lifeline.report(CannotStart(exc.info, status))
        return status
    except Exception as exc:  # its traceback goes to the log, its name to the supervisor
        text = f"{type(exc).__name__}: {exc}".partition("\n")[0]
        error = Internal(text) if not _out_of_memory(exc) else OutOfCapacity(f"{NO_MEMORY} ({text})")
        lifeline.report(CannotStart(error.info, 1))
        raise


def _out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: Python's, the system's or torch's, which has no class of its own."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
