"""The flags of `segue keys`, apart from it so that `segue --help` loads no cryptography."""

from __future__ import annotations

import argparse
from pathlib import Path

#: Days that a part's certificate and the authority's are valid.
PART_DAYS, CA_DAYS = 365, 3650


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of `segue keys`."""
    command.add_argument("folder", type=Path, metavar="FOLDER", help="where the files are or will be")
    command.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="NAME=HOST,HOST",
        help="a certificate NAME.pem for a part that is reached at these addresses or names; may be repeated",
    )
    command.add_argument(
        "--renew",
        action="store_true",
        help="also issue each certificate of the folder again, with a new key and for the same addresses",
    )
    command.add_argument(
        "--days",
        type=int,
        default=PART_DAYS,
        metavar="N",
        help="days that a part's certificate is valid (default: %(default)s)",
    )
