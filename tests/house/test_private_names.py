"""Names of other packages that are private there and used here: an update that drops one says so at once.

Each has an upper bound in pyproject.toml; this test finds the private names and looks whether they exist.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from importlib import import_module
from typing import Any

import pytest
from rules import SRC

PROJECT = tomllib.loads((SRC.parents[1] / "pyproject.toml").read_text())["project"]
BOUNDED = {"torch", "numba", "uvicorn", "huggingface-hub", "transformers"}

#: What is used, by where it lies, and what it must still be: a function with these parameters, or anything.
USED: dict[str, tuple[str, ...]] = {
    "torch:ops.mkldnn._is_mkldnn_bf16_supported": (),
    "torch:_scaled_dot_product_flash_attention_for_cpu": (),
    "torch:ops.mkldnn._linear_pointwise.default": (),
    "torch:distributed.ProcessGroupGloo._Options": (),
    "torch:ops.mkldnn._linear_pointwise.binary": (),
    "torch:ops.mkldnn._reorder_linear_weight": (),
    "numba.core:cgutils": (),
    "numba.extending:intrinsic": (),
    "huggingface_hub.file_download:http_get": (
        "url",
        "temp_file",
        "resume_size",
        "headers",
        "expected_size",
        "tqdm_class",
    ),
    "huggingface_hub.constants:DOWNLOAD_CHUNK_SIZE": (),
    "huggingface_hub.constants:HF_HUB_DISABLE_TELEMETRY": (),
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol": (
        "config",
        "server_state",
        "app_state",
        "_loop",
    ),
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_message_begin": ("self",),
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_headers_complete": ("self",),
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_message_complete": ("self",),
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.shutdown": ("self",),
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol._unset_keepalive_if_required": ("self",),
    "uvicorn:Server.capture_signals": ("self",),
    "uvicorn:Server.startup": ("self", "sockets"),
}
_ATTRIBUTE = re.compile(
    r"\b(?:torch|numba|uvicorn|transformers|huggingface_hub)(?:\.[a-z_]\w*)*\._\w+(?:\.\w+)*"
)


@pytest.mark.parametrize("name", USED)
def test_a_private_name_that_we_use_exists(name: str) -> None:
    module, _, path = name.partition(":")
    package = module.split(".")[0]
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
        assert found is not None, (
            f"{package} of this version has no {name.replace(':', '.')}, which segue uses: adapt it, or "
            "lower the package's upper bound in pyproject.toml"
        )
    if USED[name]:
        missing = [p for p in USED[name] if p not in inspect.signature(found).parameters]
        assert not missing, f"{name.replace(':', '.')} of this version of {package} takes no {missing}"


def test_uvicorns_protocol_still_has_what_ours_reads() -> None:
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    source = inspect.getsource(HttpToolsProtocol)
    for attribute in ("self.transport", "self.cycle", "self.scope", "self.client", "self.loop"):
        assert f"{attribute}:" in source or f"{attribute} =" in source, (
            f"uvicorn's protocol has no {attribute}"
        )
    assert {"servers", "started"} <= set(
        re.findall(r"self\.(\w+)\s*(?:=|:)", inspect.getsource(uvicorn.Server))
    )


def test_every_private_name_in_our_sources_is_in_the_list() -> None:
    listed = {name.replace(":", ".") for name in USED}
    for path in SRC.rglob("*.py"):
        text = path.read_text()
        code = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
        for found in _ATTRIBUTE.findall(text):
            if not any(isinstance(value, str) and found in value for value in code):
                assert any(found.startswith(name) or name.startswith(found) for name in listed), (
                    f"{path}: {found}"
                )


def test_packages_whose_private_names_we_use_have_an_upper_bound() -> None:
    extras = PROJECT["optional-dependencies"]
    requirements = [*PROJECT["dependencies"], *extras["serve"], *extras["engine"]]
    by_name = {re.split(r"[<>=;]", text)[0].strip(): text for text in requirements}
    assert {name for name in BOUNDED if "<" not in by_name[name]} == set()
