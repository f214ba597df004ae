"""Our connector class against the recorded base class of each supported version of vLLM.

`make test-vllm` compares the record with the vLLM that is installed there.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_api import RECORDED, difference, signatures

VERSIONS: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
found = find_spec("segue.integrations.vllm")
assert found is not None
assert found.origin is not None
SOURCE = Path(found.origin).with_name("vllm_connector.py").read_text()
OURS = signatures(SOURCE, "SegueConnector")
#: what vLLM does not ask for
OWN = {"sizes"}


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_each_method_is_called_as_this_version_calls_it(version: str) -> None:
    base = VERSIONS[version]
    ours = {name: signature for name, signature in OURS.items() if name in base}
    theirs = {name: base[name].removeprefix("@abstractmethod ") for name in ours}
    assert difference(theirs, ours) == []


def test_no_method_is_left_that_no_version_calls() -> None:
    known = set().union(*VERSIONS.values())
    assert {*OURS} - known == OWN


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_each_abstract_method_is_there(version: str) -> None:
    abstract = {name for name, signature in VERSIONS[version].items() if "@abstractmethod" in signature}
    assert abstract
    assert abstract <= {*OURS}


def test_the_record_shows_a_change() -> None:
    base = "class KVConnectorBase_V1:\n def a(self, x, y=1): ...\n def _p(self): ...\n"
    assert signatures(base) == {"a": "(self, x, y=)"}
    changed = signatures("class KVConnectorBase_V1:\n def a(self, x): ...\n def b(self, **k): ...\n")
    assert difference(signatures(base), changed) == [
        "a: recorded (self, x, y=), found (self, x)",
        "b: recorded is not there, found (self, **k)",
    ]
