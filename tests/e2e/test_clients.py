"""Clients of other projects, unmodified, against a real server: `examples/clients.py`. `make clients`
installs them in an environment of their own; the test skips where it is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from served import Served
from tiny_model import TEMPLATE

ROOT = Path(__file__).parents[2]
CLIENTS = Path(os.environ.get("CLIENTS_VENV") or Path(sys.prefix) / "clients") / "bin" / "python"
NAMES = ("openai", "anthropic", "agents", "litellm", "langchain", "instructor", "open_webui")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not CLIENTS.exists(), reason=f"{CLIENTS} is missing: make clients")
def test_clients_of_other_projects_work(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = ("--dtype", "float32", "--kv-gib", "0.05", "--served-model-name", "tiny", "--port", "0")
    command = [str(CLIENTS), str(ROOT / "examples" / "clients.py")]
    with Served("--model", str(folder), *flags) as served:
        words = [*command, served.url, *NAMES, "--model", "tiny"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [name for name in NAMES if f"\n{name} works" not in done.stdout] == []
