# ruff: noqa: T201
"""Sabotages derived from the syntax tree of the production code, drawn by a seed: does any check notice?

    .venv/bin/python tools/sabotage.py --seed 1 --count 200 [--lot N] [--packages kv/layout …] [--jobs N]

`sabotages.py` lists every sabotage that its operators can make in the chosen packages; the seed draws some of
them. Each is applied to a temporary copy of `src`; the working tree is never touched. It is caught by the
first of these that fails or does not end:

1. the tests of the package's folders that execute the changed lines, quickest first (known from one recorded
   run, kept in `.cache/sabotage/` until a test or a source file changes);
2. all tests of the package's folders, unless all that execute these lines have run;
3. the simulator, `--sim-seeds` seeds.

Each verdict is a line of `--results`, and what is judged there is not judged again: a run can be ended at any
moment and go on later, `--lot` sabotages at a time. Draws and verdicts go by content, a hash of the changed
statement and of those around it: a change elsewhere, a moved file or a new name of a class changes neither.

A survivor is a missing check, or it changes nothing that anybody could see: `sabotages_harmless.txt` has
those, with the reason. Exit status 1 if fewer than `--least` percent are caught, harmless ones left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mutants import HUNT
from sabotages import Sabotage, sabotages

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "sabotage"
HARMLESS = Path(__file__).with_name("sabotages_harmless.txt")

#: Where the unit tests of a package are. Its own folder comes first.
TESTS = {
    "engine/pages.py": ("engine/test_engine_pages.py", "server/schedulers"),
    "engine/prefix.py": (
        "engine/test_engine_prefix.py",
        "engine/test_prefix_journal.py",
        "server/schedulers",
    ),
    "integrations/vllm": ("integrations/vllm",),
    "kv/agent": ("kv/manager/test_kv_agent.py",),
    "kv/layout": ("kv/layout",),
    "kv/manager.py": ("kv/manager", "kv/protocol"),
    "kv/protocol": ("kv/protocol", "kv/manager"),
    "kv/ranks": ("kv/manager", "kv/protocol"),
    "kv/ranks/checksums.py": ("kv/manager/test_conn_checksums.py", "kv/manager/test_checksum_kinds.py"),
    "kv/ranks/word_checksum.py": ("kv/manager/test_checksum_kinds.py",),
    "kv/ready.py": ("kv/manager/test_ready.py",),
    "kv/session": ("kv/session", "kv/manager", "server/frontend/test_exchange.py"),
    "kv/transport": ("kv/transport", "kv/conformance"),
    "kv/transport/staged": ("kv/transport/test_transport_staged.py", "kv/conformance"),
    "server/balance": ("server/balance",),
    "server/fleet": ("server/fleet",),
    "server/frontend": ("server/frontend",),
    "server/frontend/block_answers.py": ("server/frontend/test_other_apis.py",),
    "server/frontend/call_bodies.py": (
        "server/frontend/test_replies.py",
        "server/frontend/test_tool_calls.py",
    ),
    "server/frontend/client_tls.py": ("server/frontend/test_door.py",),
    "server/frontend/dialects.py": ("server/frontend/test_other_apis.py",),
    "server/frontend/messages_api.py": ("server/frontend/test_other_apis.py",),
    "server/frontend/openapi.py": ("server/frontend/test_openapi.py",),
    "server/frontend/origins.py": ("server/frontend/test_door.py",),
    "server/frontend/reasoning.py": ("server/frontend/test_replies.py",),
    "server/frontend/reply_parts.py": ("server/frontend/test_replies.py",),
    "server/frontend/response_template.py": ("server/frontend/test_replies.py",),
    "server/frontend/responses_api.py": ("server/frontend/test_other_apis.py",),
    "server/direct": ("server/direct",),
    "server/instance": ("server/instance", "server/direct"),
    "server/kv_events": ("server/kv_events",),
    "server/observe/logs.py": ("server/observe/test_logs.py", "server/supervisor/test_console.py"),
    "server/supervisor": ("server/supervisor",),
    "server/supervisor/local_deployments.py": ("server/supervisor/test_local_deployments.py",),
    "server/registry": ("server/registry",),
    "server/schedulers": ("server/schedulers",),
    "server/settings": ("server/settings",),
}
DEFAULT_PACKAGES = (
    "kv/protocol", "kv/manager.py", "kv/ranks", "server/schedulers", "kv/layout", "server/fleet",
    "kv/session", "kv/transport", "server/registry", "server/balance", "engine/pages.py", "engine/prefix.py",
)  # fmt: skip

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak and not slow", "--timeout=120")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a sabotage was detected: `test` (with its name), `package`, `sim` (with the rule), or
    `survived`."""

    by: str
    text: str


def files_of(package: str) -> list[Path]:
    """The source files of a package, or the one file that is named."""
    path = ROOT / "src" / "segue" / package
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def folders_of(package: str) -> list[str]:
    """The test folders of a package that exist, relative to the root."""
    return [f"tests/{name}" for name in TESTS[package] if (ROOT / "tests" / name).exists()]


def run(words: Sequence[str], source: Path, timeout_s: float) -> tuple[int, str]:
    """Run Python with `source` before everything else. Status -9 when it did not end within `timeout_s`."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(source)}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        out.seek(0)
        return status, out.read()


class Recorded:
    """The lines that each test of a package executes, and each test's duration."""

    def __init__(self, package: str) -> None:
        self.folders = folders_of(package)
        digest = hashlib.sha256()
        for path in [*files_of(package), *(p for f in self.folders for p in _tests(f))]:
            digest.update(path.read_bytes())
        where = CACHE / f"{package.replace('/', '-')}-{digest.hexdigest()[:16]}.json"
        if not where.exists():
            where.parent.mkdir(parents=True, exist_ok=True)
            words = [str(Path(__file__).with_name("sabotage_record.py")), str(where), package, *self.folders]
            status, said = run(words, ROOT / "src", 3600)
            if status != 0:
                raise SystemExit(f"the unchanged tests of {package} do not pass:\n{said[-3000:]}")
        known = json.loads(where.read_text())
        self.seconds: dict[str, float] = known["seconds"]
        self._lines: dict[str, dict[str, list[int]]] = known["lines"]
        self._names: list[str] = known["names"]

    def of(self, file: str, lines: Iterable[int]) -> tuple[list[str], bool]:
        """Tests that execute one of `lines` of `file`, quickest first, a minute of them at most; and whether
        that is all there are."""
        numbered = self._lines.get(file, {})
        hit = {self._names[n] for line in lines for n in numbered.get(str(line), ())}
        chosen: list[str] = []
        budget_s = 60.0
        for name in sorted(hit, key=lambda n: self.seconds.get(n, 0.0)):
            budget_s -= self.seconds.get(name, 0.0)
            if budget_s < 0 or len(chosen) == 400:
                break
            chosen.append(name)
        return chosen, len(chosen) == len(hit) > 0


def _tests(folder: str) -> list[Path]:
    path = ROOT / folder
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def judge(sabotage: Sabotage, recorded: Recorded, sim_seeds: int) -> Verdict:
    """Apply `sabotage` to a copy and see who notices."""
    with tempfile.TemporaryDirectory(prefix="segue-sabotage-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        target = source / "segue" / sabotage.file
        target.write_text(sabotage.apply(target.read_text()))
        names, all_of_them = recorded.of(sabotage.file, sabotage.lines)
        if names:
            status, said = run([*PYTEST, "-x", *names], source, 240)
            if status != 0:
                return Verdict("test", _failed(status, said))
        if recorded.folders and not all_of_them:
            seconds = sum(recorded.seconds.values())
            status, said = run([*PYTEST, "-x", *recorded.folders], source, 120 + 4 * seconds)
            if status != 0:
                return Verdict("package", _failed(status, said))
        if sim_seeds:
            status, said = run(["-c", HUNT, str(source), "0", str(sim_seeds), "60"], source, 1800)
            last = said.strip().split("\n")[-1]
            if status != 0:
                return Verdict("sim", f"status {status}: {last[:120]}")
            seeds, _, rule, text = json.loads(last)
            if seeds:
                return Verdict("sim", f"seed {seeds}, rule {rule}: {text[:100]}")
    return Verdict("survived", "")


def _failed(status: int, said: str) -> str:
    if status < 0:
        return "does not end"
    found = [line for line in said.split("\n") if line.startswith(("FAILED", "ERROR"))]
    return found[0][:160] if found else said.strip().split("\n")[-1][:160]


def draw(packages: Sequence[str], seed: int, count: int, only: str) -> list[tuple[str, Sabotage]]:
    """`count` of all sabotages of `packages`, each as likely as every other, by their content alone."""
    found: list[tuple[str, Sabotage]] = []
    for package in packages:
        for path in files_of(package):
            name = str(path.relative_to(ROOT / "src" / "segue"))
            found += [(package, s) for s in sabotages(name, path.read_text()) if only in s.name]
    found.sort(key=lambda drawn: drawn[1].name)
    times: Counter[str] = Counter()
    for n, (package, sabotage) in enumerate(found):  # a few statements stand in several files
        times[sabotage.key] += 1
        if times[sabotage.key] > 1:
            found[n] = package, replace(sabotage, key=f"{sabotage.key}+{times[sabotage.key]}")
    found.sort(key=lambda drawn: hashlib.sha256(f"{seed} {drawn[1].key}".encode()).digest())
    return found[:count]


def judged(results: Path) -> dict[str, dict[str, str]]:
    """The verdicts so far, by the key of the sabotage; the last one of each. Those without a key are of
    statements that are no more."""
    if not results.exists():
        return {}
    records = [json.loads(line) for line in results.read_text().split("\n") if line]
    return {record["key"]: record for record in records if "key" in record}


def harmless() -> dict[str, str]:
    """The reasons why some sabotages change nothing that anybody could see, by their keys."""
    if not HARMLESS.exists():
        return {}
    lines = [line for line in HARMLESS.read_text().split("\n") if line and not line.startswith("#")]
    return {line.partition(" ")[0]: line.rpartition(" => ")[2] for line in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="draws the sabotages")
    parser.add_argument("--count", type=int, default=200, help="how many")
    parser.add_argument("--packages", nargs="*", default=list(DEFAULT_PACKAGES))
    parser.add_argument("--only", default="", help="only sabotages whose name contains this")
    parser.add_argument("--sim-seeds", type=int, default=100, help="seeds of the simulator, 0 for none")
    parser.add_argument("--least", type=float, default=90.0, help="percent that must be caught")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only name them")
    parser.add_argument("--results", type=Path, help="default: bench/results/sabotage-SEED.jsonl")
    parser.add_argument("--lot", type=int, default=10**6, help="how many to judge now")
    args = parser.parse_args()
    drawn = draw([p for p in args.packages if files_of(p)], args.seed, args.count, args.only)
    if args.list:
        for _, sabotage in drawn:
            print(sabotage.key, sabotage.name, "|", sabotage.change)
        return 0
    results: Path = args.results or ROOT / "bench" / "results" / f"sabotage-{args.seed}.jsonl"
    known, lock = judged(results), threading.Lock()
    lot = [(package, s) for package, s in drawn if s.key not in known][: args.lot]
    recorded = {package: Recorded(package) for package in sorted({package for package, _ in lot})}

    def work(package: str, sabotage: Sabotage) -> None:
        verdict = judge(sabotage, recorded[package], args.sim_seeds)
        record = {
            "key": sabotage.key,
            "name": sabotage.name,
            "package": package,
            "change": sabotage.change,
            **asdict(verdict),
        }
        with lock, results.open("a") as file:
            file.write(json.dumps(record) + "\n")
            print(
                f"{verdict.by:<9}{sabotage.key} {sabotage.name} | {sabotage.change} | {verdict.text}",
                flush=True,
            )

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda pair: work(*pair), lot))
    known, reasons = judged(results), harmless()
    verdicts = [(s, known[s.key]["by"]) for _, s in drawn if s.key in known]
    left = [s for s, by in verdicts if by == "survived" and s.key not in reasons]
    by = Counter("harmless" if by == "survived" and s not in left else by for s, by in verdicts)
    counted = len(verdicts) - by["harmless"]
    percent = 100.0 * (counted - len(left)) / max(1, counted)
    print(f"seed {args.seed}: {counted - len(left)} of {counted} caught ({percent:.1f} %): {dict(by)}")
    print(f"{len(verdicts)} of {len(drawn)} judged")
    for survivor in left:
        print(f"survived: {survivor.key} {survivor.name} | {survivor.change}")
    return 0 if percent >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
