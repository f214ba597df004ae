"""How large the house is: lines by package, what the library loads, names that stand twice or cross an edge.

    python tools/size.py [SRC]        SRC: a folder that holds `segue` (default: this checkout's `src`)

Run it on two trees to compare them. All figures are read from the source, but for the files that a hand-off
runs: `examples/own_memory.py` under `sys.setprofile`.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The library's own entry, in trees with and without a face.
ENTRIES = ("segue.kv", "segue.conn.manager")
_TRACE = """
import runpy, sys, threading
files = set()
def seen(frame, event, arg):
    name = frame.f_code.co_filename
    if "/segue/" in name:
        files.add(name)
threading.setprofile(seen)
sys.setprofile(seen)
runpy.run_path(sys.argv[1], run_name="__main__")
sys.setprofile(None)
print("files", len(files))
"""


class Tree:
    """The modules below one `segue`, and what each imports of the others."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.paths = {self._name(path): path for path in sorted((source / "segue").rglob("*.py"))}
        self.lines = {name: len(path.read_text().splitlines()) for name, path in self.paths.items()}
        self.imports: dict[str, set[str]] = {}
        self.private: list[str] = []
        for name, path in self.paths.items():
            self.imports[name] = set(self._imported(name, ast.parse(path.read_text())))

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.source).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _imported(self, name: str, tree: ast.Module) -> list[str]:
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.append(whole if whole in self.paths else node.module)
                    hidden = alias.name.startswith("_") and alias.name != "__version__"
                    if hidden and node.module in self.paths and package(node.module) != package(name):
                        self.private.append(f"{name}: {whole}")
        return [module for module in found if module in self.paths]

    def closure(self, entry: str) -> set[str]:
        """Every module that the entry loads once each of its names was asked for."""
        seen: set[str] = set()
        left = [entry]
        while left:
            module = left.pop()
            if module not in seen:
                seen.add(module)
                left += self.imports[module]
        return seen

    def twice(self) -> dict[str, list[str]]:
        """Names that several modules have."""
        found = defaultdict(list)
        for name, path in self.paths.items():
            if path.stem not in ("__init__", "__main__"):
                found[path.stem].append(name)
        return {stem: names for stem, names in found.items() if len(names) > 1}


def package(module: str) -> str:
    """The folder below `segue` that a module is in; of the large ones the folder within."""
    parts = module.split(".")[1:]
    return "/".join(parts[:2] if parts[:1] in (["kv"], ["server"], ["lab"]) and len(parts) > 2 else parts[:1])


def handed_over(source: Path) -> int:
    """Files of segue that run while two engines of one process hand KV over."""
    example = source.parent / "examples" / "own_memory.py"
    environ = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, "-c", _TRACE, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environ)
    return int(done.stdout.split()[-1])


def main() -> None:
    """Print the tables."""
    source = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "src").resolve()
    tree = Tree(source)
    by_package: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, lines in tree.lines.items():
        by_package[package(name)] += lines
        files[package(name)] += 1
    print("| package | files | lines |\n|---|---|---|")
    for name, lines in sorted(by_package.items()):
        print(f"| {name or '.'} | {files[name]} | {lines} |")
    entry = next(entry for entry in ENTRIES if entry in tree.paths)
    closure = tree.closure(entry)
    tests = list((source.parent / "tests").rglob("*.py"))
    print("\n| figure | |\n|---|---|")
    print(f"| lines of src | {sum(tree.lines.values())} |")
    print(f"| lines of tests | {sum(len(path.read_text().splitlines()) for path in tests)} |")
    print(f"| modules that `{entry}` loads | {len(closure)} |")
    print(f"| their lines | {sum(tree.lines[name] for name in closure)} |")
    print(f"| files that run in one hand-off (`examples/own_memory.py`) | {handed_over(source)} |")
    print(f"| module names that stand in several places | {len(tree.twice())} |")
    print(f"| private names imported over a package's edge | {len(tree.private)} |")


if __name__ == "__main__":
    main()
