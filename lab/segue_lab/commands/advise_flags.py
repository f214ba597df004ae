"""The flags of `segue advise`; apart from its work, so that `--help` loads nothing."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from segue.kv import ConfigError
from segue.server.settings.shared_config import DTYPES

_GIVE = (
    "say how fast a worker is: --measure (this machine's engine), --measured FILE (an earlier measurement), "
    "or --compute-tflops and --memory-gb-per-s (its hardware)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseConfig:
    """One question. Numbers of hardware are of one worker, all its ranks together."""

    model: str | None = None
    parameters: float | None = None
    active_parameters: float | None = None
    kv_bytes_per_token: int | None = None
    dtype: str = "auto"
    cache: str | None = None
    measure: bool = False
    save: str | None = None
    measured: str | None = None
    threads: int = 1
    compute_tflops: float | None = None
    memory_gb_per_s: float | None = None
    step_overhead_ms: float = 0.0
    request_overhead_ms: float = 0.0
    kv_gib: float | None = None
    wire: tuple[str, ...] = ()
    transport: str | None = None
    workers: int | None = None
    rate: float | None = None
    concurrency: int | None = None
    input_tokens: str = "512"
    output_tokens: str = "64"
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
    chunk_tokens: int = 512
    max_batch: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "--parameters": (self.parameters, 1, 1e15),
            "--active-parameters": (self.active_parameters, 1, self.parameters or 0),
            "--kv-bytes-per-token": (self.kv_bytes_per_token, 1, 2**40),
            "--threads-per-worker": (self.threads, 1, 4096),
            "--compute-tflops": (self.compute_tflops, 1e-6, 1e9),
            "--memory-gb-per-s": (self.memory_gb_per_s, 1e-3, 1e9),
            "--step-overhead-ms": (self.step_overhead_ms, 0, 1e5),
            "--request-overhead-ms": (self.request_overhead_ms, 0, 1e6),
            "--kv-gib": (self.kv_gib, 2**-20, 2**20),
            "--workers": (self.workers, 1, 64),
            "--rate": (self.rate, 1e-3, 1e5),
            "--concurrency": (self.concurrency, 1, 4096),
            "--slo-ttft-ms": (self.slo_ttft_ms, 1e-3, 1e9),
            "--slo-itl-ms": (self.slo_itl_ms, 1e-3, 1e9),
            "--chunk-tokens": (self.chunk_tokens, 1, 2**20),
            "--max-batch": (self.max_batch, 1, 65536),
        }
        for flag, (value, low, high) in limits.items():
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{flag} must be between {low:g} and {high:g}, not {value:g}")
        self._check_speed()
        self._check_model()
        if (self.rate is None) == (self.concurrency is None):
            raise ConfigError("say how much is asked: --rate (requests a second) or --concurrency, not both")
        if self.rate is None and self.workers is None and self.slo_ttft_ms is self.slo_itl_ms is None:
            raise ConfigError(
                "with --concurrency any number of workers will do; give --workers, or a target "
                "(--slo-ttft-ms, --slo-itl-ms)"
            )

    @property
    def _hardware(self) -> bool:
        return self.compute_tflops is not None or self.memory_gb_per_s is not None

    def _check_speed(self) -> None:
        if self.measure + (self.measured is not None) + self._hardware != 1:
            raise ConfigError(f"{_GIVE}; one of the three")
        if self._hardware and None in (self.compute_tflops, self.memory_gb_per_s):
            raise ConfigError(
                "--compute-tflops and --memory-gb-per-s go together: one bounds prompts, the other tokens"
            )
        if self._hardware and not self.wire:
            raise ConfigError("say how KV would move: --wire NAME=GB/S, or NAME=GB/S,MICROSECONDS")
        if self.save is not None and not self.measure:
            raise ConfigError("--save writes what --measure finds; add --measure")

    def _check_model(self) -> None:
        sizes = self.parameters is not None or self.kv_bytes_per_token is not None
        if sizes and None in (self.parameters, self.kv_bytes_per_token):
            raise ConfigError("--parameters and --kv-bytes-per-token go together")
        if sizes and (self.model is not None or not self._hardware):
            raise ConfigError("--parameters stands in for MODEL, with the figures of hardware; leave one out")
        if self.measured is not None and self.model is not None:
            raise ConfigError("--measured FILE has its own model; leave MODEL out")
        if self.measured is None and self.model is None and not sizes:
            raise ConfigError("name a MODEL, or give --parameters and --kv-bytes-per-token")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `segue advise` to its parser."""
    add = parser.add_argument_group("model").add_argument
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder, config.json, or a model of the Hub that is here"
    )
    add("--parameters", type=float, metavar="N", help="in place of MODEL: its parameters, as 8e9")
    add("--active-parameters", type=float, metavar="N", help="of these, that one token uses (default: all)")
    add("--kv-bytes-per-token", type=int, metavar="N", help="with --parameters: KV of one token, all layers")
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of weights and KV; auto is this host's type with --measure, else bfloat16 (default: auto)",
    )
    add("--cache", metavar="DIR", help="folder for fetched and converted models")
    add = parser.add_argument_group("how fast one worker is").add_argument
    add("--measure", action="store_true", help="time this machine's engine and transports (half a minute)")
    add("--save", metavar="FILE", help="write the results of --measure, for --measured")
    add("--measured", metavar="FILE", help="take an earlier measurement")
    add(
        "--threads-per-worker",
        dest="threads",
        type=int,
        default=1,
        metavar="N",
        help="--measure: (default: 1)",
    )
    add("--compute-tflops", type=float, metavar="X", help="sustained speed of matrix products, not the peak")
    add("--memory-gb-per-s", type=float, metavar="X", help="sustained speed of reading weights and KV")
    add(
        "--step-overhead-ms",
        type=float,
        default=0.0,
        metavar="X",
        help="of each forward besides (default: 0)",
    )
    add(
        "--request-overhead-ms",
        type=float,
        default=0.0,
        metavar="X",
        help="of each request before its prompt is computed: frontend, network (default: 0)",
    )
    add("--kv-gib", type=float, metavar="G", help="memory for KV of one worker (default: not limited)")
    add = parser.add_argument_group("how KV moves").add_argument
    add(
        "--wire",
        action="append",
        default=[],
        metavar="NAME=GB/S[,US]",
        help="a transport: its speed, and microseconds of each hand-off besides; may be repeated",
    )
    add("--transport", metavar="NAME", help="the one that splits use (default: the fastest)")
    add = parser.add_argument_group("workload").add_argument
    add("--rate", type=float, metavar="R", help="requests a second, at random moments")
    add("--concurrency", type=int, metavar="C", help="or: requests always in flight")
    add(
        "--input-tokens",
        default="512",
        metavar="LENGTHS",
        help="512, 128-1024, or with weights 128-512:3,4000:1 (default: 512)",
    )
    add("--output-tokens", default="64", metavar="LENGTHS", help="the same (default: 64)")
    add("--slo-ttft-ms", type=float, metavar="X", help="most that the p99 of the time to first token may be")
    add("--slo-itl-ms", type=float, metavar="Y", help="most that the p99 of the time between tokens may be")
    add = parser.add_argument_group("deployment").add_argument
    add("--workers", type=int, metavar="N", help="how many there are (default: the fewest that do)")
    add("--chunk-tokens", type=int, default=512, metavar="N", help="of prompts in one forward (default: 512)")
    add("--max-batch", type=int, default=64, metavar="N", help="sequences in one forward (default: 64)")
    add("--seed", type=int, default=0, help="of lengths and arrivals (default: 0)")
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write the advice as JSON (default: print it)"
    )


def config_of(args: argparse.Namespace) -> AdviseConfig:
    """The question that `args` ask. Raises ConfigError."""
    fields = {name: getattr(args, name) for name in AdviseConfig.__dataclass_fields__}
    return AdviseConfig(**fields | {"wire": tuple(args.wire)})


def wire_of(text: str) -> tuple[str, float, float]:
    """The name, bytes a second and seconds besides of one `--wire`. Raises ConfigError."""
    name, _, figures = text.partition("=")
    speed, _, latency = figures.partition(",")
    try:
        gb_per_s, us = float(speed), float(latency or 0)
    except ValueError:
        gb_per_s = us = math.nan
    if not name or not 0 < gb_per_s < 1e6 or not 0 <= us < 1e9:
        raise ConfigError(
            f"--wire must look like rdma=40 (GB/s) or rdma=40,15 (and microseconds), not {text!r}"
        )
    return name, gb_per_s * 1e9, us * 1e-6
