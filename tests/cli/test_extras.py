"""An installation without extras: what works works, what does not says which extra it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from segue.cli import extras
from segue.cli.flags import OTHER_VARIABLES
from segue.integrations.sglang.sglang_settings import PREFIX, BackendSettings
from segue.kv.errors import ConfigError
from segue.server.settings.commands import COMMANDS
from segue.server.settings.layers import settings

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
#: The extra's packages that are modules of other names.
MODULES = {"huggingface-hub": "huggingface_hub", "prometheus-client": "prometheus_client"}

#: Runs the command line where the modules named in BLOCKED are not installed.
WITHOUT = """
import os, sys

class Blocked:
    names = set(os.environ["BLOCKED"].split())
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from segue.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run(*words: str, blocked: tuple[str, ...] = extras.ENGINE) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"BLOCKED": " ".join([*blocked, "pip"])}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environ,
    )


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_-]", text)[0] for text in requirements}


@pytest.mark.parametrize(("extra", "modules"), [("engine", extras.ENGINE), ("serve", extras.SERVE)])
def test_every_package_of_an_extra_is_looked_for(extra: str, modules: tuple[str, ...]) -> None:
    listed = {MODULES.get(name, name) for name in names(PROJECT["optional-dependencies"][extra])} - {"pip"}
    assert listed == set(modules)


@pytest.mark.parametrize(
    "words",
    [
        ("serve",),
        ("prefill", "--model", "smollm2"),
        ("decode", "--model", "smollm2", "--registry", "http://127.0.0.1:1"),
        ("unified", "--model", "smollm2", "--registry", "http://127.0.0.1:1"),
        ("frontend", "--registry", "http://127.0.0.1:1"),
    ],
)
def test_what_needs_the_extra_says_so_in_one_sentence(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(f"segue: segue {words[0]} needs the engine extra (")
    assert line.endswith("not installed): pip install 'segue[engine]'")


@pytest.mark.parametrize("module", extras.ENGINE + extras.SERVE)
def test_one_that_is_missing_alone_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = extras.importlib.util.find_spec
    monkeypatch.setattr(
        extras.importlib.util, "find_spec", lambda name: None if name == module else found(name)
    )
    with pytest.raises(extras.ConfigError, match=rf"\({module} not installed\)"):
        extras.need("serve")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--help",), "run a whole deployment"),
        (("serve", "--help"), "--kv-gib"),
        (("version",), "segue "),
        (("sim", "--seeds", "1", "--hand-offs", "4"), "0 seeds broke an invariant"),
        (("doctor", "--json"), "loopback"),  # it measures each transport
    ],
)
def test_what_needs_no_model_works_without_it(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.returncode in (0, 1 if words[0] == "doctor" else 0), done.stderr
    assert said in done.stdout
    assert "Traceback" not in done.stderr


def test_a_measuring_client_works_without_it() -> None:
    done = run("bench", "http://127.0.0.1:1")
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


# ---- what our own sentences recommend -----------------------------------------------------------


def test_the_wheel_that_the_download_error_recommends_is_taken(tmp_path: Path) -> None:
    wheel = tmp_path / "model.whl"
    wheel.write_bytes(b"not a zip")
    environ = os.environ | {"SEGUE_MODEL_WHEEL": str(wheel), "SEGUE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "segue.cli.main", "serve", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert done.returncode == 2
    assert f"{wheel} is not the expected wheel" in done.stderr
    assert "warning" not in done.stderr


def test_every_variable_that_a_sentence_names_is_one_that_counts() -> None:
    known = {s.variable for cls in COMMANDS.values() for s in settings(cls).values()} | set(OTHER_VARIABLES)
    known |= {PREFIX + field.upper() for field in BackendSettings.__struct_fields__} | {PREFIX.rstrip("_")}
    for path in (Path(__file__).parents[2] / "src").rglob("*.py"):
        if path.name == "flag_aliases.py":
            continue
        named = set(re.findall(r"SEGUE_[A-Z][A-Z_]*[A-Z]", path.read_text())) - {"SEGUE_PORT"}
        assert named <= known, f"{path}: {named - known}"


def test_a_module_of_a_package_that_is_not_there_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "SERVE", ("no_such_package.part",))
    with pytest.raises(ConfigError, match=r"no_such_package\.part not installed"):
        extras.need("ps")


def test_a_frontend_needs_what_reads_tokenizers_and_templates_and_no_engine() -> None:
    assert {"transformers", "tokenizers", "jinja2"} <= set(extras.FRONTEND) < set(extras.ENGINE)
    assert "torch" not in extras.FRONTEND
