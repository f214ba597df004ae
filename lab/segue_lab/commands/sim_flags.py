"""The flags of `segue sim`, apart from it so that `segue --help` loads no simulator."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of `segue sim`."""
    command.add_argument("--seed", type=int, default=0, metavar="S", help="the first seed (default 0)")
    command.add_argument("--seeds", type=int, metavar="N", help="how many seeds to run (default 1)")
    command.add_argument(
        "--hand-offs", type=int, metavar="N", help="run seeds until there were this many hand-offs"
    )
    command.add_argument(
        "--under-faults",
        action="store_true",
        help="towards --hand-offs, count only seeds with a fault",
    )
    command.add_argument(
        "--check-every",
        type=int,
        default=8,
        metavar="N",
        help="look at a node's tables every N turns (default 8)",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there as JSON")
    command.add_argument(
        "--only", default="", metavar="NAMES", help="of one seed, only these requests and faults (r3,f1)"
    )
