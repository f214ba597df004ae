"""`segue advise`: how many prefill and decode workers a workload needs, or that they should not be apart."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from segue import __version__
from segue.cli.commands import models
from segue.cli.extras import need
from segue.cli.terminal import print_json, terminal
from segue.engine.cpu.processor import AUTO, this_processor
from segue.kv import DECODE_ERRORS, ConfigError
from segue_lab.advise.advice import Question, advise
from segue_lab.advise.costs import (
    Hardware,
    ModelCosts,
    StepTimes,
    TimedForward,
    fit,
    fit_error,
    from_hardware,
)
from segue_lab.advise.queues import HandOffWire, WorkerKind, hand_off_times
from segue_lab.advise.workload import AskedLoad, LatencyTargets, Lengths
from segue_lab.commands import advise_model
from segue_lab.commands.advise_flags import AdviseConfig, config_of, wire_of
from segue_lab.commands.advise_report import UNLIMITED_TOKENS, AdviseReport, WireRow


class MeasuredMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement that `--measure` makes and `--save` writes: forwards of one worker with `threads`
    threads, and transports between two processes of this host."""

    model: str
    dtype: str
    threads: int
    kv_token_bytes: int
    state_bytes: int
    context_tokens: int
    forwards: tuple[TimedForward, ...]
    wires: tuple[HandOffWire, ...]


class _WorkerSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast one worker is with which model, from whatever source."""

    model: str
    steps: StepTimes
    kv_token_bytes: int
    state_bytes: int
    context_tokens: int
    wires: tuple[HandOffWire, ...]
    fit_error: float | None = None


def report_of(config: AdviseConfig) -> AdviseReport:
    """Measure or read what is needed, and calculate. Raises ConfigError."""
    load = AskedLoad(
        prompt=Lengths.parse(config.input_tokens, "--input-tokens"),
        output=Lengths.parse(config.output_tokens, "--output-tokens"),
        rate=config.rate,
        concurrency=config.concurrency,
    )
    given = tuple(
        HandOffWire(name=name, bytes_per_s=speed, latency_s=latency)
        for name, speed, latency in map(wire_of, config.wire)
    )
    speed = _speed(config, given)
    longest = load.prompt.longest + load.output.longest
    if longest > speed.context_tokens:
        raise ConfigError(
            f"a sequence of {longest} tokens is longer than the model's context of {speed.context_tokens}; "
            "give shorter --input-tokens or --output-tokens"
        )
    kind = WorkerKind(
        steps=speed.steps,
        chunk_tokens=config.chunk_tokens,
        max_batch=config.max_batch,
        kv_tokens=UNLIMITED_TOKENS
        if config.kv_gib is None
        else int(config.kv_gib * 2**30 / speed.kv_token_bytes),
        request_s=config.request_overhead_ms / 1e3,
        step_s=config.step_overhead_ms / 1e3,
    )
    targets = LatencyTargets(
        ttft_s=None if config.slo_ttft_ms is None else config.slo_ttft_ms / 1e3,
        itl_s=None if config.slo_itl_ms is None else config.slo_itl_ms / 1e3,
    )
    wire = _chosen(speed.wires, config.transport)
    question = Question(
        kind=kind,
        load=load,
        targets=targets,
        wire=wire,
        kv_token_bytes=speed.kv_token_bytes,
        state_bytes=speed.state_bytes,
        seed=config.seed,
    )
    return AdviseReport(
        version=__version__,
        command=shlex.join(["segue", *sys.argv[1:]]),
        model=speed.model,
        steps=speed.steps,
        fit_error=speed.fit_error,
        kv_bytes_per_request=load.prompt.mean * speed.kv_token_bytes + speed.state_bytes,
        wires=tuple(_wire_row(question, each) for each in speed.wires),
        transport=wire.name,
        question=question,
        advice=advise(question, config.workers),
    )


def _speed(config: AdviseConfig, given: tuple[HandOffWire, ...]) -> _WorkerSpeed:
    if config.measure or config.measured is not None:
        machine = read_machine(config.measured) if config.measured is not None else measure_machine(config)
        steps = fit(machine.forwards)
        return _WorkerSpeed(
            model=machine.model,
            steps=steps,
            kv_token_bytes=machine.kv_token_bytes,
            state_bytes=machine.state_bytes,
            context_tokens=machine.context_tokens,
            wires=given + machine.wires,
            fit_error=fit_error(steps, machine.forwards),
        )
    assert config.compute_tflops is not None
    assert config.memory_gb_per_s is not None
    costs = _costs(config)
    hardware = Hardware(flops=config.compute_tflops * 1e12, memory_bytes_per_s=config.memory_gb_per_s * 1e9)
    return _WorkerSpeed(
        model=costs.name,
        steps=from_hardware(costs, hardware),
        kv_token_bytes=costs.kv_token_bytes,
        state_bytes=costs.state_bytes,
        context_tokens=costs.context_tokens,
        wires=given,
    )


def _costs(config: AdviseConfig) -> ModelCosts:
    # Another machine's figures: one that is described by its hardware multiplies bfloat16.
    dtype = "bfloat16" if config.dtype == AUTO else config.dtype
    if config.parameters is not None:
        assert config.kv_bytes_per_token is not None
        item_bytes = 4 if dtype == "float32" else 2
        return advise_model.explicit(
            config.parameters, config.active_parameters, config.kv_bytes_per_token, item_bytes
        )
    assert config.model is not None
    return advise_model.costs(advise_model.found(config.model), dtype)


def measure_machine(config: AdviseConfig) -> MeasuredMachine:
    """Measure this machine's engine and transports, and write the file of `--save`. Raises ConfigError."""
    need("advise --measure")
    assert config.model is not None
    folder = models.resolve(config.model, config.cache)
    dtype = this_processor().dtype(config.dtype)
    size = models.model_size(folder, dtype)
    if size is None:
        raise ConfigError(f"{folder / 'config.json'} does not say how large the model's KV is")
    from segue.cli.doctor.doctor_command import transport_rows
    from segue.kv import KINDS
    from segue_lab.commands.advise_measure import measure

    rows, _ = transport_rows(KINDS.available())
    wires = tuple(
        HandOffWire(name=row.name, bytes_per_s=row.speed.gb_per_s * 1e9, latency_s=row.speed.page_us * 1e-6)
        for row in rows
        if row.speed is not None
    )
    machine = MeasuredMachine(
        model=folder.name,
        dtype=dtype,
        threads=config.threads,
        kv_token_bytes=size.token_bytes,
        state_bytes=size.state_bytes,
        context_tokens=size.context_tokens,
        forwards=tuple(measure(folder, dtype, config.threads)),
        wires=wires,
    )
    if config.save is not None:
        _write(config.save, "--save", machine)
    return machine


def read_machine(name: str) -> MeasuredMachine:
    """The measurement in the file `name`. Raises ConfigError."""
    try:
        machine = msgspec.json.decode(Path(name).read_bytes(), type=MeasuredMachine)
    except OSError as exc:
        raise ConfigError(f"--measured {name} cannot be read: {exc.strerror}") from exc
    except DECODE_ERRORS as exc:
        raise ConfigError(f"--measured {name} is not what segue advise --save writes: {exc}") from exc
    return machine


def _write(name: str, flag: str, what: object) -> None:
    try:
        Path(name).write_bytes(msgspec.json.format(msgspec.json.encode(what)) + b"\n")
    except OSError as exc:
        raise ConfigError(f"{flag} {name} cannot be written: {exc.strerror}") from exc


def _chosen(wires: Sequence[HandOffWire], name: str | None) -> HandOffWire:
    if name is None:
        if not wires:
            raise ConfigError("no transport was measured; say how KV would move: --wire NAME=GB/S")
        return max(wires, key=lambda wire: wire.bytes_per_s)
    for wire in wires:
        if wire.name == name:
            return wire
    raise ConfigError(f"--transport {name} is none of those known: {', '.join(w.name for w in wires)}")


def _wire_row(question: Question, wire: HandOffWire) -> WireRow:
    prompt = max(1, round(question.load.prompt.mean))
    times = hand_off_times(question.kind, wire, prompt, question.kv_token_bytes, question.state_bytes)
    return WireRow(
        name=wire.name,
        gb_per_s=wire.bytes_per_s / 1e9,
        wire_ms=times.wire_s * 1e3,
        exposed_ms=times.exposed_s * 1e3,
    )


def run(args: argparse.Namespace) -> int:
    """Print the advice, or write it as JSON to the file `--json` (`-`: standard output). 1 if no number of
    workers, or not the given one, will do; else 0."""
    report = report_of(config_of(args))
    if args.json == "-":
        print_json(report)
    else:
        from segue_lab.commands.advise_text import show

        show(report, terminal())
        if args.json is not None:
            _write(args.json, "--json", report)
    return 0 if report.advice.split is not None else 1
