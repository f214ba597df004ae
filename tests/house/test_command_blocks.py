"""Each command in a block of a page is run by a test, or this file says why none can run it. `test_docs.py`
parses those of segue as segue would."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_docs import PAGES, ROOT, blocks

from segue.cli.main import main
from segue.server.settings.commands import COMMANDS
from segue.server.settings.layers import Layers, build, parse_toml, settings

#: A block without a language is commands; `text` is output or a drawing.
LANGUAGES = {"", "bash", "mermaid", "python", "text", "toml"}

#: Commands by their first words: the file under `tests` that runs them, with other values, and a word of it.
RUN = {
    "prometheus --config.file=": ("deploy/test_prometheus.py", "--config.file="),
    ".venv/clients/bin/python examples/clients.py": ("e2e/test_clients.py", '"clients.py"'),
    "segue serve": ("e2e/served.py", 'command: str = "serve"'),
    "segue prefill": ("e2e/test_parts.py", 'command="prefill"'),
    "segue decode": ("e2e/test_parts.py", 'command="decode"'),
    "segue frontend": ("e2e/test_parts.py", 'command="frontend"'),
    "segue ps": ("e2e/test_parts.py", 'command("ps"'),
    "segue drain": ("e2e/test_parts.py", '("drain"'),
    "segue resume": ("e2e/test_parts.py", '("resume"'),
    "segue switch": ("e2e/test_parts.py", 'command("switch"'),
    "segue explain": ("e2e/test_parts.py", 'command("explain"'),
    "segue top": ("server/frontend/test_dashboard.py", 'main(["top"'),
    "segue bench": ("cli/test_bench.py", 'main(["bench"'),
    "segue advise": ("cli/test_advise.py", 'main(["advise"'),
    "segue doctor": ("cli/test_doctor.py", 'main(["doctor"'),
    "segue sim": ("lab/sim/test_sim_slice.py", '"sim"'),
    "segue keys": ("cli/test_keys.py", 'main(["keys"'),
    "curl http://127.0.0.1:8000/v1/chat/completions": ("e2e/test_serve.py", "README.md"),
    "curl http://127.0.0.1:8000/v1/models": ("server/frontend/test_http.py", '"/v1/models"'),
    "export OTEL_EXPORTER_OTLP_ENDPOINT": ("server/observe/test_traces.py", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    "python -m sglang_router.launch_router": (
        "server/direct/test_foreign_routers.py",
        "sglang_router.launch",
    ),
    "python -m sglang.launch_server": ("sglang_engines/sglang_side.py", "launch_server("),
    "vllm-router": ("server/direct/test_foreign_routers.py", '"vllm-router"'),
    "vllm serve": ("vllm_engines/serving.py", '"--kv-transfer-config"'),
    "serve run fleet:app": ("ray_cluster/ray_hosts.py", "serve.run(build_app("),
    "(umask 077": ("house/test_command_blocks.py", "def test_the_secret"),
    "head -c 32 /dev/urandom": ("house/test_command_blocks.py", "def test_the_secret"),
}
#: Commands that no test can run here, and why.
NOT_RUN = {
    "git clone": "no address yet",
    "python3 -m venv lm": "lm-eval is 1 GiB: docs/clients.md says with which version it was run",
    "lm/bin/": "lm-eval is 1 GiB: docs/clients.md says with which version it was run",
    "docker build": "no Docker; `tests/deploy` reads the files",
    "helm install": "no cluster; `tests/deploy` renders the chart",
    "kubectl": "no cluster; `tests/deploy` renders the overlays",
    "guidellm": "not installed: docs/clients.md names the versions that were tried by hand",
    "aiperf": "not installed: docs/clients.md names the versions that were tried by hand",
    "vllm bench serve": "not installed: docs/clients.md names the versions that were tried by hand",
    "pytest -m soak": "it is the test",
}


def commands(text: str) -> list[str]:
    """Each command of each block on its own, without comments and without what stands before its name."""
    found = []
    for language, content in blocks(text):
        if language not in ("", "bash"):
            continue
        content = re.sub(r"(^|\s)#.*|\\\n", "", content)
        lexer = shlex.shlex(content, posix=True, punctuation_chars=";&\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
        words: list[str] = []
        for word in [*lexer, "\n"]:
            if word.strip(";&\n"):
                words.append(word)
                continue
            command = re.sub(r"^([A-Z_]+=\S* |unshare -n )*(\.venv/bin/)?", "", " ".join(words))
            found += [command] if command not in ("", "cd segue") else []
            words = []
    return found


def faults(command: str) -> list[str]:
    """The reasons why a command would not do what its page says."""
    words = command.split()
    found = [
        f"{command}: {word} does not exist"
        for word in words
        if re.match(r"(bench|deploy|examples|tests|tools)/", word) and not (ROOT / word).exists()
    ]
    if words[0] == "make":
        if not re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
            found.append(f"{command}: no such target")
    elif command.startswith("python bench/"):  # run by tests/e2e/test_bench_commands.py, which knows each
        known = "" if found else (ROOT / words[1]).read_text()
        found += [f"{command}: no flag {w}" for w in words if w.startswith("--") and f'"{w}"' not in known]
    elif not command.startswith((*RUN, *NOT_RUN)):
        found.append(f"{command}: add it to RUN or NOT_RUN")
    if command.startswith("helm"):
        values = yaml.safe_load((ROOT / "deploy/chart/values.yaml").read_text())
        for value in re.findall(r"--set (\S+?)=", command):
            here: Any = values
            for key in value.split("."):
                here = here.get(key) if isinstance(here, dict) else None
            found += [] if here is not None else [f"{command}: the chart has no value {value}"]
    return found


ALL = [(page, command) for page in PAGES for command in commands(page.read_text())]


def test_each_command_in_a_block_is_run_by_a_test_or_the_reason_is_here() -> None:
    found = [f"{page.name}: {fault}" for page, command in ALL for fault in faults(command)]
    assert len(ALL) > 60
    assert found == []


def test_each_block_has_a_language_of_ours() -> None:
    assert {language for page in PAGES for language, _ in blocks(page.read_text())} <= LANGUAGES


def test_the_lists_name_commands_of_pages_and_tests_that_run_them() -> None:
    gone = [start for start in RUN | NOT_RUN if not any(c.startswith(start) for _, c in ALL)]
    assert gone == []
    idle = [file for file, word in RUN.values() if word not in (ROOT / "tests" / file).read_text()]
    assert idle == []


# ---- commands that need neither a model nor other hosts run as they stand -----------------------------


def of_page(name: str, start: str) -> list[str]:
    found = [command for page, command in ALL if page.name == name and command.startswith(start)]
    assert found
    return found


def test_the_secret_of_several_hosts_is_its_owners_alone(tmp_path: Path) -> None:
    (block,) = [text for _, text in blocks((ROOT / "docs/hosts.md").read_text()) if text.startswith("(umask")]
    subprocess.run(["bash", "-ec", block], cwd=tmp_path, check=True, timeout=60)
    (made,) = tmp_path.iterdir()
    assert made.name == "segue.secret"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert len(made.read_text().strip()) == 44


def test_the_certificates_of_the_parts_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in of_page("certificates.md", "segue keys"):
        assert main(command.split()[1:]) == 0
    made = {path.name for path in (tmp_path / "tls").iterdir()}
    assert made >= {f"{part}.{end}" for part in ("prefill", "decode", "frontend") for end in ("pem", "key")}


def test_the_file_for_all_is_one_that_each_command_takes() -> None:
    (text,) = [
        text for language, text in blocks((ROOT / "docs/running.md").read_text()) if language == "toml"
    ]
    known = {command: list(settings(cls)) for command, cls in COMMANDS.items()}
    for command in ("prefill", "decode", "frontend"):
        warned: list[str] = []
        layers = Layers({}, {}, parse_toml(text, "segue.toml"), "segue.toml")
        build(COMMANDS[command], layers, command=command, known=known, also=[], fixed={}, warn=warned.append)
        assert warned == []
