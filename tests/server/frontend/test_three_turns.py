"""Clients and command-line agents of other projects, unmodified: three turns with two calls of a tool each,
against a model that follows a script, without a key and without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from frontend_rig import FakeBackend, Running, Told, make_tokenizer, serve
from three_turns import OTHERS, OWN, question
from tiny_model import TEMPLATE

from loopback import only_loopback
from segue.engine.request import Request
from segue.kv.limits import Limits
from segue.server.frontend.tokenizer import ModelTokenizer

CLIENTS = Path(os.environ.get("CLIENTS_VENV") or Path(sys.prefix) / "clients") / "bin" / "python"
AGENTS = Path(os.environ.get("AGENTS_FOLDER") or Path(sys.prefix) / "agents") / "node_modules" / ".bin"
ANSWERS = [f"Answer {turn}." for turn in (1, 2, 3)]
WAIT_S = 120.0


@dataclass
class Script(FakeBackend):
    """In each turn calls `tool` twice, and answers once both results are in the prompt."""

    tool: str = "look"
    arguments: Callable[[int, str], dict[str, Any]] = lambda turn, side: {"place": f"{turn}{side}"}
    step: int = 16
    context_tokens: int | None = 10**6

    def submit(self, request: Request, *, budget_s: float) -> Told:
        prompt = self.tokenizer.decode(request.prompt, skip_special=False)
        turn = max((int(found) for found in re.findall(r"turn (\d): look", prompt)), default=0)
        if not turn or "<tool_call>" not in prompt:
            self.text = "A title"  # agents ask for one, without tools
        elif all(f"{1000 + turn}{side}" in prompt for side in "ab"):
            assert all(answer in prompt for answer in ANSWERS[: turn - 1]), "earlier turns are lost"
            self.text = ANSWERS[turn - 1]
        else:
            calls = ({"name": self.tool, "arguments": self.arguments(turn, side)} for side in "ab")
            self.text = "I look." + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
        return super().submit(request, budget_s=budget_s)


def served(**script: Any) -> Any:
    tokenizer = ModelTokenizer(make_tokenizer(TEMPLATE))
    return serve(Script(tokenizer, **script), tokenizer, limits=Limits(max_body_bytes=2**23, drain_s=2))


@pytest.mark.parametrize("client", OWN)
def test_openai_and_anthropic(client: str) -> None:
    with served() as running:
        assert OWN[client](running.url) == ANSWERS


@pytest.mark.slow
@pytest.mark.skipif(not CLIENTS.exists(), reason=f"{CLIENTS} is missing: make clients")
@pytest.mark.parametrize("client", OTHERS)
def test_clients_of_other_projects(client: str) -> None:
    command = [str(CLIENTS), str(Path(__file__).with_name("three_turns.py"))]
    with only_loopback(), served() as running:
        words = [*command, running.url, client]
        done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(OTHERS[client], ANSWERS)


# ---- agents of the command line ----------------------------------------------------------------------


def shell(turn: int, side: str) -> str:
    """A command whose output is not in its words."""
    return f"echo $((1000+{turn})){side}"


class Agent:
    """An agent of the command line: its file, and the tool of it that runs commands."""

    file: str
    tool: str

    def arguments(self, turn: int, side: str) -> dict[str, Any]:
        return {"command": shell(turn, side), "description": "look"}

    def prepare(self, home: Path, url: str) -> dict[str, str]:
        """Write its settings into `home`, and return its environment."""
        raise NotImplementedError

    def words(self, turn: int) -> list[str]:
        raise NotImplementedError

    def answer(self, said: str) -> str:
        raise NotImplementedError


class Codex(Agent):
    """OpenAI's Codex, over `/v1/responses`."""

    file, tool = "codex", "exec_command"
    settings = """
model = "tiny"
model_provider = "segue"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.segue]
name = "segue"
base_url = "{url}/v1"
wire_api = "responses"
"""

    def arguments(self, turn: int, side: str) -> dict[str, Any]:
        return {"cmd": shell(turn, side)}

    def prepare(self, home: Path, url: str) -> dict[str, str]:
        (home / ".codex").mkdir()
        (home / ".codex" / "config.toml").write_text(self.settings.format(url=url))
        return {}

    def words(self, turn: int) -> list[str]:
        return ["exec", "--json", "--skip-git-repo-check", *(["resume", "--last"] if turn > 1 else [])]

    def answer(self, said: str) -> str:
        items = [json.loads(line).get("item", {}) for line in said.splitlines()]
        return [str(item["text"]) for item in items if item.get("type") == "agent_message"][-1]


class ClaudeCode(Agent):
    """Anthropic's Claude Code, over `/v1/messages`."""

    file, tool = "claude", "Bash"

    def prepare(self, home: Path, url: str) -> dict[str, str]:
        names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
        off = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER")
        server = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none"}
        return server | dict.fromkeys(names, "tiny") | dict.fromkeys(off, "1")

    def words(self, turn: int) -> list[str]:
        return [
            *("-p", "--output-format", "json", "--allowedTools", "Bash"),
            *(["--continue"] if turn > 1 else []),
            "--",
        ]

    def answer(self, said: str) -> str:
        return str(json.loads(said)["result"])


class OpenCode(Agent):
    """opencode, over `/v1/chat/completions`."""

    file, tool = "opencode", "bash"

    def prepare(self, home: Path, url: str) -> dict[str, str]:
        model = {"name": "tiny", "limit": {"context": 100_000, "output": 4000}}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
            "models": {"tiny": model},
        }
        settings = {
            "provider": {"segue": provider},
            "model": "segue/tiny",
            "small_model": "segue/tiny",
            "autoupdate": False,
            "share": "disabled",
            "permission": {"bash": "allow"},
        }
        (home / "opencode.json").write_text(json.dumps(settings))
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        return {f"OPENCODE_DISABLE_{name}": "1" for name in off}

    def words(self, turn: int) -> list[str]:
        return ["run", "--format", "json", *(["--continue"] if turn > 1 else [])]

    def answer(self, said: str) -> str:
        parts = [json.loads(line)["part"] for line in said.splitlines() if line.startswith("{")]
        return [str(part["text"]) for part in parts if part.get("type") == "text"][-1]


@pytest.fixture(params=[Codex, ClaudeCode, OpenCode])
def agent(request: pytest.FixtureRequest) -> Iterator[Agent]:
    made: Agent = request.param()
    if not (AGENTS / made.file).exists():
        pytest.skip(f"{AGENTS / made.file} is missing: make agents")
    with only_loopback():
        yield made


@pytest.mark.slow
def test_agents_of_the_command_line(agent: Agent, tmp_path: Path) -> None:
    running: Running
    with served(tool=agent.tool, arguments=agent.arguments) as running:
        basic = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C.UTF-8"}
        env = basic | agent.prepare(tmp_path, running.url)
        for turn in (1, 2, 3):
            done = subprocess.run(
                [str(AGENTS / agent.file), *agent.words(turn), question(turn)],
                cwd=tmp_path,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert agent.answer(done.stdout) == ANSWERS[turn - 1]
