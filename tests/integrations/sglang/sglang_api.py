"""The parts of SGLang that the backend is built on: `python sglang_api.py VERSION PATH/TO/sglang/srt` records
them in sglang_api.json. Run it for another version: the difference of the file is the difference of the
interface."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

RECORDED = Path(__file__).with_name("sglang_api.json")
#: classes whose public methods, properties and fields are recorded, by module
CLASSES = {
    "disaggregation/base/conn.py": (
        "KVArgs",
        "KVPoll",
        "BaseKVManager",
        "BaseKVSender",
        "BaseKVReceiver",
        "BaseKVBootstrapServer",
    ),
    "disaggregation/common/conn.py": (
        "KVTransferError",
        "PrefillServerInfo",
        "CommonKVManager",
        "CommonKVSender",
        "CommonKVReceiver",
        "CommonKVBootstrapServer",
    ),
    "disaggregation/utils.py": ("TransferBackend", "KVClassType"),
}
#: functions and methods that are hooked, overridden or called by a private name
NAMES = {
    "disaggregation/common/conn.py": (
        "_get_bootstrap_session",
        "CommonKVManager._get_prefill_recompute_session",
        "CommonKVManager._register_topology_row",
        "CommonKVManager._fail_prefill_recompute",
        "CommonKVReceiver._get_bootstrap_info_from_server",
        "CommonKVBootstrapServer._handle_route_put",
        "CommonKVBootstrapServer._handle_route_get",
    ),
    "disaggregation/utils.py": ("get_kv_class",),
    "disaggregation/prefill.py": (
        "PrefillBootstrapQueue.create_sender",
        "PrefillBootstrapQueue.pop_bootstrapped",
    ),
    "managers/scheduler.py": ("Scheduler.is_fully_idle",),
    "mem_cache/allocator/paged.py": (
        "PagedTokenToKVPoolAllocator.free",
        "PagedTokenToKVPoolAllocator.free_page_ids",
    ),
    "mem_cache/allocator/token.py": (
        "TokenToKVPoolAllocator.free",
        "TokenToKVPoolAllocator.free_page_ids",
    ),
    "disaggregation/decode.py": (
        "DecodePreallocQueue._init_kv_manager",
        "DecodePreallocQueue._create_receiver_and_enqueue",
        "DecodePreallocQueue._init_receiver",
        "DecodeTransferQueue._defer_release",
        "DecodeTransferQueue.resolve_deferred_releases",
    ),
    "plugins/hook_registry.py": ("HookRegistry.register",),
    "arg_groups/choices.py": ("add_disagg_transfer_backend_choices",),
}
#: modules whose uses of a backend beside the base classes are recorded, by the name that holds it
USES = ("disaggregation/prefill.py", "disaggregation/decode.py", "disaggregation/utils.py")
HOLDERS = {
    "manager": ("kv_manager", "kv_mgr"),
    "sender": ("disagg_kv_sender", "sender"),
    "receiver": ("kv_receiver",),
}
Api = dict[str, dict[str, str]]


def api(root: Path) -> Api:
    """Everything that is recorded of the sources below `root` (`sglang/srt`)."""
    trees = {name: ast.parse((root / name).read_text()) for name in {*CLASSES, *NAMES, *USES}}
    found: Api = {}
    for module, names in CLASSES.items():
        for name in names:
            found[name] = members(trees[module], name)
    for module, names in NAMES.items():
        found[module] = {name: _find(trees[module], name) for name in names}
    for holder, names in HOLDERS.items():
        used = set().union(*(uses(trees[module], names) for module in USES))
        found[f"uses of a {holder}"] = dict.fromkeys(sorted(used), "")
    return found


def members(tree: ast.Module, name: str) -> dict[str, str]:
    """The public members of a class: methods with their parameters, fields with their types or values."""
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    result = {}
    for node in found.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.name == "__init__" or not node.name.startswith("_"):
                    result[node.name] = signature(node)
            case ast.AnnAssign(target=ast.Name(id=field)):
                result[field] = ast.unparse(node.annotation)
            case ast.Assign(targets=[ast.Name(id=field)]):
                result[field] = f"= {ast.unparse(node.value)}"
    return result


def signature(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Names of the parameters, `=` behind one with a default; decorators that change how it is called."""
    args = method.args
    first_default = len(args.args) - len(args.defaults)
    names = [arg.arg + ("=" if i >= first_default else "") for i, arg in enumerate(args.args)]
    names += [f"*{args.vararg.arg}"] if args.vararg else (["*"] if args.kwonlyargs else [])
    names += [
        arg.arg + ("=" if default is not None else "")
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    kinds = [f"@{node.id} " for node in method.decorator_list if isinstance(node, ast.Name)]
    return f"{''.join(sorted(kinds))}({', '.join(names)})"


def _find(tree: ast.Module, dotted: str) -> str:
    node: ast.AST = tree
    for part in dotted.split("."):
        named = [n for n in ast.iter_child_nodes(node) if part in (getattr(n, "name", None), _assigned(n))]
        if not named:
            return "is not there"
        node = named[-1]
    if isinstance(node, ast.Assign):
        return f"= {ast.unparse(node.value)}"
    return signature(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else "a class"


def _assigned(node: ast.AST) -> str | None:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return None


def uses(tree: ast.Module, names: tuple[str, ...]) -> set[str]:
    """The attributes that are read or called of anything with one of these names, also by `getattr`."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=holder) | ast.Attribute(attr=holder), attr=used):
                if holder in names:
                    found.add(used)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[ast.Name(id=holder) | ast.Attribute(attr=holder), ast.Constant(value=str(used)), *_],
            ):
                if holder in names:
                    found.add(used)
    return found


def difference(recorded: Api, found: Api) -> list[str]:
    """A line for each name that is new, gone or different."""
    lines = []
    for group in sorted({*recorded, *found}):
        before, now = recorded.get(group, {}), found.get(group, {})
        for name in sorted({*before, *now}):
            pair = before.get(name, "is not there"), now.get(name, "is not there")
            if pair[0] != pair[1]:
                lines.append(f"{group}: {name}: recorded {pair[0]!r}, found {pair[1]!r}")
    return lines


if __name__ == "__main__":
    versions = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    versions[sys.argv[1]] = api(Path(sys.argv[2]))
    RECORDED.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")
