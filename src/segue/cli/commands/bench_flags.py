"""The flags of `segue bench`; apart from its work, so that `--help` loads nothing."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

from segue.cli.commands.client_flags import add_key_file, server_of
from segue.kv import ConfigError

MAX_REQUESTS = 1_000_000
MAX_CONNECTIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """One measurement. Requests are due at Poisson arrivals of `rate` a second, or at the times of a trace,
    or else as soon as fewer than `concurrency` are in flight. With both, one that is due waits until fewer
    are in flight; latencies count from its sending, and the wait is reported apart."""

    url: str
    model: str | None = None
    api: str = "completions"
    input_tokens: int = 512
    shared_prefix_tokens: int = 0
    output_tokens: int | None = None
    requests: int = 64
    warmup: int = 4
    concurrency: int | None = None
    rate: float | None = None
    dataset: str | None = None
    detailed: bool = False
    seed: int = 0
    timeout_s: float = 600.0
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
    api_key_file: str | None = None
    https_cert: str | None = None

    def __post_init__(self) -> None:
        if self.shared_prefix_tokens >= self.input_tokens:
            raise ConfigError(
                f"--shared-prefix-tokens {self.shared_prefix_tokens} must be less than --input-tokens "
                f"{self.input_tokens}: each prompt ends with tokens of its own"
            )
        limits = {
            "--input-tokens": (self.input_tokens, 1, 10**7),
            "--shared-prefix-tokens": (self.shared_prefix_tokens, 0, 10**7),
            "--output-tokens": (1 if self.output_tokens is None else self.output_tokens, 1, 10**6),
            "--requests": (self.requests, 1, MAX_REQUESTS),
            "--warmup": (self.warmup, 0, MAX_REQUESTS),
            "--concurrency": (1 if self.concurrency is None else self.concurrency, 1, MAX_CONNECTIONS),
            "--rate": (1.0 if self.rate is None else self.rate, 1e-3, 1e5),
            "--timeout-s": (self.timeout_s, 0.1, 86400),
            "--slo-ttft-ms": (1.0 if self.slo_ttft_ms is None else self.slo_ttft_ms, 0.001, 1e9),
            "--slo-itl-ms": (1.0 if self.slo_itl_ms is None else self.slo_itl_ms, 0.001, 1e9),
        }
        for flag, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise ConfigError(f"{flag} must be between {low:g} and {high:g}, not {value:g}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `segue bench` to its parser."""
    add = parser.add_argument
    add(
        "url",
        metavar="URL",
        nargs="?",
        help="server to measure, http://HOST:PORT (default: the one deployment of this user on this host)",
    )
    add("--model", metavar="NAME", help="model to ask for (default: the first one the server lists)")
    add(
        "--api",
        choices=("completions", "chat"),
        default="completions",
        help="which API (default: completions)",
    )
    add("--input-tokens", type=int, default=512, metavar="N", help="tokens of a prompt (default: 512)")
    add(
        "--shared-prefix-tokens",
        type=int,
        default=0,
        metavar="N",
        help="of these, equal in all prompts (default: 0)",
    )
    add(
        "--output-tokens",
        type=int,
        metavar="N",
        help="tokens to generate (default: 64, or as many as in the dataset)",
    )
    add(
        "--dataset",
        metavar="FILE",
        help="prompts and lengths: a ShareGPT file (JSON) or a Mooncake trace (JSON lines with times)",
    )
    add("--requests", type=int, default=64, metavar="N", help="measured requests (default: 64)")
    add("--warmup", type=int, default=4, metavar="N", help="requests before the measured ones (default: 4)")
    add(
        "--concurrency",
        type=int,
        metavar="C",
        help="most requests in flight (default: 4, but with --rate or a trace as many as are due)",
    )
    add("--rate", type=float, metavar="R", help="Poisson arrivals a second, whatever the server does")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    add(
        "--timeout-s", type=float, default=600.0, metavar="S", help="most one request may take (default: 600)"
    )
    add("--slo-ttft-ms", type=float, metavar="X", help="time to first token that counts as good")
    add(
        "--slo-itl-ms",
        type=float,
        metavar="Y",
        help="p99 of a request's gaps between tokens that counts as good",
    )
    add_key_file(parser)
    add(
        "--json",
        metavar="FILE",
        help="write the result as JSON with the names of vllm bench serve; - is standard output",
    )
    add("--detailed", action="store_true", help="with --json: also the times of each request")
    add("--plot", metavar="FILE", help="draw the latencies as a PNG (needs segue[plot])")


def config_of(args: argparse.Namespace) -> BenchConfig:
    """The measurement that `args` ask for. Raises ConfigError."""
    given = {name: value for name, value in vars(args).items() if name in BenchConfig.__dataclass_fields__}
    return BenchConfig(**given | asdict(server_of(args)))
