"""1,000 requests while etcd, the registry, is killed, started again and stopped: `python bench/etcd.py`.

Two prefill and two decode instances and a frontend (real processes, a tiny random model) find each other by a
real etcd. Clients stream greedy and seeded completions; each is compared with the answer from before. After a
quarter of the requests etcd gets kill -9 and is started again, then it is stopped for longer than its leases
last. At the end an instance is killed, comes back in a new incarnation and is found, and every part must hold
nothing, else this fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import from_tests  # noqa: F401
import etcd_faults
import tiny_model

from recorded import commit

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.save(Path(folder))
        outcome = etcd_faults.run(Path(folder), model, NAMES, requests=args.requests, at_once=args.at_once)
    report = {"commit": commit(), "at_once": args.at_once, **dataclasses.asdict(outcome)}
    print(json.dumps(report, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
