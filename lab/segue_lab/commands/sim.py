"""`segue sim`: run the production control plane in virtual time, seed by seed, under faults."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from segue.kv import ConfigError
from segue_lab.commands.sim_flags import add_arguments
from segue_lab.sim.run import Outcome, load, replay_command, run_scenario, shrink

#: Runs that may be spent on making a failing scenario smaller.
SHRINK_RUNS = 200


def run(args: argparse.Namespace) -> int:
    """Run what `args` say; 1 when an invariant did not hold, with its story and how to replay it."""
    if args.only and ((args.seeds or 1) != 1 or args.hand_offs):
        raise ConfigError("--only shows one seed; leave --seeds and --hand-offs out")
    if (args.seeds is not None and args.seeds < 1) or (args.hand_offs is not None and args.hand_offs < 1):
        raise ConfigError("--seeds and --hand-offs must be at least 1")
    if args.under_faults and not args.hand_offs:
        raise ConfigError("--under-faults says which hand-offs count; give their number with --hand-offs")
    if args.check_every < 1:
        raise ConfigError("--check-every must be at least 1")
    counts: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    failed: list[Outcome] = []
    seed, events, virtual_s, started = args.seed, 0, 0.0, time.perf_counter()
    under_faults = 0
    # Modules live until the end; frozen, they are not searched at each collection of a run's short-lived
    # objects.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    cpu_before_s = time.process_time()
    shown_at = started
    while True:
        outcome = run_scenario(load(seed, args.only), check_every=args.check_every)
        counts.update(outcome.counts)
        under_faults += outcome.under_faults
        events, virtual_s = events + outcome.events, virtual_s + outcome.virtual_s
        if outcome.failed:
            failed.append(outcome)
            rules[outcome.rule] += 1
            if len(failed) == 1:
                _show(seed, args.only, outcome, args.check_every)
        seed += 1
        gc.collect()  # a seed's pools hang in cycles: gigabytes, until the collector comes by itself
        now = time.perf_counter()
        if now - shown_at > 2.0 and sys.stderr.isatty():
            shown_at = now
            print(f"\r{seed - args.seed} seeds, {counts['hand-offs']} hand-offs ", end="", file=sys.stderr)
        if args.hand_offs and (under_faults if args.under_faults else counts["hand-offs"]) < args.hand_offs:
            continue
        if seed - args.seed >= (args.seeds or 1):
            break
    took_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before_s
    result = {
        "first_seed": args.seed,
        "seeds": seed - args.seed,
        "events": events,
        "hand_offs": counts["hand-offs"],
        "hand_offs_under_faults": under_faults,
        "hand_offs_per_s": counts["hand-offs"] / took_s,
        "hand_offs_per_cpu_s": counts["hand-offs"] / cpu_s,
        "virtual_hours": virtual_s / 3600,
        "seconds": took_s,
        "cpu_seconds": cpu_s,
        "counts": dict(sorted(counts.items())),
        "failed_seeds": [o.seed for o in failed],
        "broken_rules": dict(rules),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    worked = [f"  {name}: {count}" for name, count in sorted(counts.items()) if name.startswith("room rule")]
    if worked:
        print("\n".join(["rules of rooms and their uses:", *worked]))
    print(
        f"{result['seeds']} seeds, {events} events, {counts['hand-offs']} hand-offs ({under_faults} of them "
        f"in seeds with a fault), {virtual_s / 3600:.1f} virtual hours in {took_s:.1f} s "
        f"({cpu_s:.1f} s of CPU time): {counts['hand-offs'] / cpu_s:.0f} hand-offs per CPU second, "
        f"{len(failed)} seeds broke an invariant"
    )
    return 1 if failed else 0


def _show(seed: int, only: str, outcome: Outcome, check_every: int) -> None:
    """Print the smallest version of a failure, its timeline and its replay command."""
    whole = load(seed)
    small = load(seed, only)
    if not only:
        again = partial(run_scenario, check_every=check_every)
        small = shrink(small, outcome.rule, budget=SHRINK_RUNS, run=again)
    told = run_scenario(small, timeline=True, check_every=check_every)
    print(f"seed {seed} broke invariant {told.text or outcome.text}")
    for line in told.timeline:
        print(line)
    for fault in small.faults:
        print(f"  fault {fault}")
    for plan in small.rooms[:20]:
        print(f"  room {plan}")
    for wanted in small.requests[:20]:
        print(f"  request {wanted}")
    print(f"features: {', '.join(outcome.features)}")
    # A long run may take hours, with its output in a file: print its first failure at once.
    print(f"replay: {replay_command(small, whole, check_every)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m segue_lab.commands.sim`, the same command without the rest of segue."""
    parser = argparse.ArgumentParser(prog="segue sim", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
