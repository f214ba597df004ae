"""The backend against the recorded interface of each version of SGLang that it was run with."""

from __future__ import annotations

import ast
import json
import re

import pytest
from sglang_api import RECORDED, Api, difference, members, uses
from sglang_pair import kv_args

from segue.integrations.sglang.sglang_phases import SglPoll
from segue.integrations.sglang.sglang_settings import TRIED_VERSIONS

VERSIONS: dict[str, Api] = json.loads(RECORDED.read_text())


def test_the_recorded_versions_are_the_ones_that_are_let_in() -> None:
    assert sorted(VERSIONS) == sorted(TRIED_VERSIONS)


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_phases_have_sglangs_numbers(version: str) -> None:
    theirs = {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper(): value
        for name, value in VERSIONS[version]["KVPoll"].items()
    }
    assert theirs == {phase.name: f"= {phase.value}" for phase in SglPoll}


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_each_field_of_kv_args_that_is_read_is_there(version: str) -> None:
    assert {*vars(kv_args([]))} <= {*VERSIONS[version]["KVArgs"]}


def test_the_record_shows_a_change() -> None:
    before = "class A:\n x: int\n def a(self, y=1, *, z): ...\n def _p(self): ...\n"
    after = "class A:\n x: str\n def a(self, y): ...\n async def b(self, **k): ...\n"
    recorded, found = ({"A": members(ast.parse(source), "A")} for source in (before, after))
    assert recorded == {"A": {"x": "int", "a": "(self, y=, *, z)"}}
    assert difference(recorded, found) == [
        "A: a: recorded '(self, y=, *, z)', found '(self, y)'",
        "A: b: recorded 'is not there', found '(self, **k)'",
        "A: x: recorded 'int', found 'str'",
    ]
    assert uses(
        ast.parse("req.kv_receiver.clear(); getattr(kv_receiver, 'x', 1); other.y"), ("kv_receiver",)
    ) == {"clear", "x"}
