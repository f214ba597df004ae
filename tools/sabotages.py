"""The operators: which sabotages can be derived from one source file.

| operator | what it does |
|---|---|
| drop | removes a call, a store to an attribute or an item, `del`, `raise`, `continue`, `break` |
| negate | turns the condition of an `if`, a `while` or a comprehension round |
| bound | `<` becomes `<=`, `>` becomes `>=`, and the other way round |
| step | takes the `+ 1` or `- 1` away |
| either | `and` becomes `or`, and the other way round |
| swap | exchanges two calls that stand one after the other |
| extreme | `min` becomes `max`, and the other way round |
| key | one component of the tuples that are keys of one table counts no more, wherever the file uses it |

What only writes a log, a metric's help or a text of an error is left alone.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the bytes from `start` to `end` of the file's text (UTF-8) by `new`."""

    start: int
    end: int
    new: str


@dataclass(frozen=True, slots=True)
class Sabotage:
    """One change. `name` is for people. `key` is made of the change and of the statements around it, so that
    verdicts outlive a move of the file and new names of classes and functions; `lines` are those it changes,
    `change` shows it."""

    name: str
    key: str
    file: str
    lines: tuple[int, ...]
    change: str
    edits: tuple[Edit, ...]

    def apply(self, text: str) -> str:
        """The sabotaged file."""
        data = text.encode()
        for edit in sorted(self.edits, key=lambda e: -e.start):
            data = data[: edit.start] + edit.new.encode() + data[edit.end :]
        return data.decode()


_LOGS = frozenset({"debug", "info", "warning", "error", "exception", "log", "critical"})
_FLIPS: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_SIGNS: dict[type[ast.cmpop], str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_TABLE_CALLS = frozenset({"get", "pop", "setdefault", "add", "discard", "remove"})


class _File:
    """Positions of one parsed file, as offsets into its bytes."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.split(b"\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.tree = ast.parse(text)
        self.count: dict[str, int] = defaultdict(int)
        self.context: dict[int, list[str]] = {}
        self._read_contexts(self.tree, "")

    def _read_contexts(self, owner: ast.AST, header: str) -> None:
        """For each node: the line of its statement, of those before and after it, and of their block
        (but for the names of functions and classes), as `ast.unparse` writes them."""
        for body in (
            getattr(owner, field, None) for field in ("body", "orelse", "handlers", "cases", "finalbody")
        ):
            if not isinstance(body, list):
                continue
            shown = ["", *(ast.unparse(each).partition("\n")[0] for each in body), ""]
            for n, each in enumerate(body):
                named = isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                self._read_contexts(each, "" if named else shown[n + 1])
                for node in ast.walk(each):
                    self.context.setdefault(id(node), [header, *shown[n : n + 3]])

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def make(self, operator: str, scope: str, node: ast.AST, what: str, *edits: Edit) -> Sabotage:
        shown = " ".join(what.split())
        name = self._numbered(f"{self.name}:{scope}:{operator}:{shown[:90]}", " #")
        # Without blanks: how a statement is laid out changes nothing.
        made = ["".join(part.split()) for part in (what, *(edit.new for edit in edits))]
        content = json.dumps([operator, made, self.context[id(node)]])
        key = self._numbered(hashlib.sha256(content.encode()).hexdigest()[:16], "-")
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        lines = tuple(range(first, last + 1))
        return Sabotage(name, key, self.name, lines, f"{operator}: {shown[:160]}", edits)

    def _numbered(self, name: str, sign: str) -> str:
        self.count[name] += 1
        return name if self.count[name] == 1 else f"{name}{sign}{self.count[name]}"


def sabotages(name: str, text: str) -> list[Sabotage]:
    """All that the operators make of the file `name` with this text."""
    file = _File(name, text)
    found: list[Sabotage] = []
    for scope, function in _functions(file.tree, ""):
        found += _of_function(file, scope, function)
    for scope, owner in _classes(file.tree, ""):
        found += _keys(file, scope, owner)
    return found


def _functions(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The outermost functions and the methods; what is nested in one belongs to it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{scope}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{scope}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from _functions(child, scope)


def _classes(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"{scope}{child.name}", child


def _of_function(
    file: _File, scope: str, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Sabotage]:
    if function.name in ("__repr__", "__str__"):
        return
    quiet = {id(n) for s in ast.walk(function) if _says_only(s) for n in ast.walk(s)}
    for node in ast.walk(function):
        if id(node) in quiet:
            continue
        if isinstance(node, ast.stmt):
            yield from _statement(file, scope, node)
        for body in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(body, list):
                yield from _swaps(file, scope, body)
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not _is_type_checking(node.test):
            yield _negated(file, scope, node.test)
        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield _negated(file, scope, test)
        if isinstance(node, ast.expr):
            yield from _expression(file, scope, node)


def _says_only(node: ast.AST) -> bool:
    """A log line, a docstring, an assertion, or the text of an error."""
    if isinstance(node, ast.Expr):
        call = node.value
        if isinstance(call, ast.Constant):
            return True
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            return call.func.attr in _LOGS and ast.unparse(call.func.value) in ("log", "logging", "logger")
    return isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _statement(file: _File, scope: str, node: ast.stmt) -> Iterator[Sabotage]:
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        stored = any(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    elif isinstance(node, ast.AugAssign):
        stored = True
    elif isinstance(node, ast.AnnAssign):
        stored = (
            isinstance(node.target, ast.Attribute) and node.value is not None and scope[-8:] != "__init__"
        )
    else:
        stored = False
    if scope.endswith("__init__") and stored:
        return  # without it the object cannot be used at all
    if call or stored or isinstance(node, ast.Delete | ast.Raise | ast.Continue | ast.Break):
        start, end = file.span(node)
        yield file.make("drop", scope, node, file.text(node), Edit(start, end, "pass"))


def _swaps(file: _File, scope: str, body: list[ast.stmt]) -> Iterator[Sabotage]:
    for first, second in itertools.pairwise(body):
        calls = all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) for s in (first, second))
        if calls and not _says_only(first) and not _says_only(second):
            one, two = file.text(first), file.text(second)
            edits = (Edit(*file.span(first), two), Edit(*file.span(second), one))
            if one != two:
                yield file.make("swap", scope, second, f"{one[:70]} <-> {two[:70]}", *edits)


def _negated(file: _File, scope: str, test: ast.expr) -> Sabotage:
    start, end = file.span(test)
    return file.make("negate", scope, test, file.text(test), Edit(start, end, f"(not ({file.text(test)}))"))


def _expression(file: _File, scope: str, node: ast.expr) -> Iterator[Sabotage]:
    shown = file.text(node)
    start, end = file.span(node)
    if isinstance(node, ast.Compare):
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if type(operator) in _FLIPS:
                gap = (file.span(left)[1], file.span(right)[0])
                between = file.data[slice(*gap)].decode()
                sign, flipped = _SIGNS[type(operator)], _FLIPS[type(operator)]
                new = between.replace(sign, flipped, 1)
                yield file.make("bound", scope, node, f"{shown} ({sign} to {flipped})", Edit(*gap, new))
            left = right
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        if isinstance(node.right, ast.Constant) and node.right.value == 1:
            yield file.make("step", scope, node, shown, Edit(start, end, f"({file.text(node.left)})"))
    elif isinstance(node, ast.BoolOp):
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        edits = []
        for one, two in itertools.pairwise(node.values):
            gap = (file.span(one)[1], file.span(two)[0])
            edits.append(Edit(*gap, file.data[slice(*gap)].decode().replace(word, other, 1)))
        whole = (Edit(start, start, "("), *edits, Edit(end, end, ")"))
        yield file.make("either", scope, node, f"{shown} ({word} to {other})", *whole)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        other = "max" if node.func.id == "min" else "min"
        yield file.make("extreme", scope, node, shown, Edit(*file.span(node.func), other))


def _keys(file: _File, scope: str, owner: ast.ClassDef) -> Iterator[Sabotage]:
    """Tables `self.x` of a class whose keys are written as tuples: forget one component everywhere."""
    uses: dict[tuple[str, int], list[ast.Tuple]] = defaultdict(list)
    for node in ast.walk(owner):
        table: ast.expr | None = None
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            table, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in _TABLE_CALLS:
                table, key = node.func.value, node.args[0]
        elif (
            isinstance(node, ast.Compare)
            and len(node.ops) == 1
            and isinstance(node.ops[0], ast.In | ast.NotIn)
        ):
            table, key = node.comparators[0], node.left
        if isinstance(table, ast.Attribute) and isinstance(key, ast.Tuple):
            uses[table.attr, len(key.elts)].append(key)
    for (name, size), keys in uses.items():
        if len(keys) < 2 or size < 2:
            continue
        for n in range(size):
            edits = [Edit(*file.span(key.elts[n]), "0") for key in keys]
            what = f"{name}[…] without {file.text(keys[0].elts[n])}"
            yield file.make("key", scope, keys[0], what, *edits)
