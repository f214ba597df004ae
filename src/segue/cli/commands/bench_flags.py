"""The flags of `segue bench`; apart from its work, so that `--help` loads nothing."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import NamedTuple

from segue.cli.commands.client_flags import add_key_file, server_of
from segue.kv import ConfigError

MAX_REQUESTS = 1_000_000
MAX_CONNECTIONS = 4096


class _Number(NamedTuple):
    """A flag with a number: the field of `BenchConfig`, the range, the metavar and the help."""

    key: str
    low: float
    high: float
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return f"--{self.key.replace('_', '-')}"


NUMBERS = (
    _Number("input_tokens", 1, 10**7, "N", "tokens of a prompt (default: 512)"),
    _Number("shared_prefix_tokens", 0, 10**7, "N", "of these, equal in all prompts (default: 0)"),
    _Number("output_tokens", 1, 10**6, "N", "tokens to generate (default: 64, or as many as in the dataset)"),
    _Number("requests", 1, MAX_REQUESTS, "N", "measured requests (default: 64)"),
    _Number("warmup", 0, MAX_REQUESTS, "N", "requests before the measured ones (default: 4)"),
    _Number(
        "concurrency",
        1,
        MAX_CONNECTIONS,
        "C",
        "most requests in flight (default: 4, but with --rate or a trace as many as are due)",
    ),
    _Number("rate", 1e-3, 1e5, "R", "Poisson arrivals a second, whatever the server does"),
    _Number("timeout_s", 0.1, 86400, "S", "most one request may take (default: 600)"),
    _Number("slo_ttft_ms", 0.001, 1e9, "X", "time to first token that counts as good"),
    _Number("slo_itl_ms", 0.001, 1e9, "Y", "p99 of a request's gaps between tokens that counts as good"),
)


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
        for number in NUMBERS:
            value = getattr(self, number.key)
            if value is not None and not number.low <= value <= number.high:
                raise ConfigError(
                    f"{number.flag} must be between {number.low:g} and {number.high:g}, not {value:g}"
                )


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
    for number in NUMBERS:
        field = BenchConfig.__dataclass_fields__[number.key]
        kind = float if "float" in str(field.type) else int
        add(number.flag, type=kind, default=field.default, metavar=number.metavar, help=number.help)
    add(
        "--dataset",
        metavar="FILE",
        help="prompts and lengths: a ShareGPT file (JSON) or a Mooncake trace (JSON lines with times)",
    )
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
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
