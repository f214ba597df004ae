"""The pages say what is so: links and paths resolve, commands parse, every error code is explained."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from segue.cli import flags
from segue.cli.main import parser
from segue.kv.errors import ConfigError, ErrorCode, SegueError, status_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TROUBLES = ROOT / "docs" / "troubleshooting.md"

FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
CODE_HEADING = re.compile(r"^### `([A-Z_]+)` *$", re.MULTILINE)
#: A folder of this repository.
FOLDER = re.compile(r"`((?:src|tests|bench|docs|tools|examples)/[\w/-]*)`")
#: A path with a folder in it. Files of models and results that a command writes have none, or another ending.
FILE = re.compile(r"(?<![\w./…~-])((?:[\w-]+/)+[\w.-]+\.(?:py|md|txt|json))\b")


def blocks(text: str) -> list[tuple[str, str]]:
    """The language and the content of each block."""
    return [(language, textwrap.dedent(content)) for language, content in BLOCK.findall(text)]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as hosts of Markdown make them."""
    words = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", h) for h in HEADING.findall(FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", w.lower()).replace(" ", "-") for w in words}


def link_faults(page: Path, text: str) -> list[str]:
    """Links of `text`, which lies at `page`, that lead nowhere."""
    found = []
    for target in LINK.findall(SPAN.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        if not to.exists():
            found.append(f"{page.name}: {target} does not exist")
        elif anchor and anchor not in anchors(text if to == page else to.read_text()):
            found.append(f"{page.name}: {target} has no such heading")
    return found


def page_faults(name: str, text: str) -> list[str]:
    """Pages that the source file `name` mentions and that are neither in the root nor in `docs`."""
    named = set(re.findall(r"(?<![\w./*-])[\w./-]*\w\.md\b", text))
    return sorted(
        f"{name}: {n} does not exist"
        for n in named
        if not any((r / n) in PAGES for r in (ROOT, ROOT / "docs"))
    )


def path_faults(page: str, text: str) -> list[str]:
    """Files and folders of ours that `text` names and that do not exist (from the root; files also below
    `src/segue`)."""
    folders = {name for name in FOLDER.findall(FENCE.sub("", text)) if not (ROOT / name).exists()}
    named = {path for span in [*SPAN.findall(text), *FENCE.findall(text)] for path in FILE.findall(span)}
    roots = (ROOT, ROOT / "src" / "segue", ROOT / "docs")
    missing = {n for n in named if not any((r / n).exists() for r in roots)}
    return sorted(f"{page}: {n} does not exist" for n in missing | folders)


def commands(text: str) -> list[tuple[list[str], bool]]:
    """The `segue` commands of a page as words, and whether each is whole: a line of a block is, a span of
    code may only name a command and some of its flags."""
    lines = [line.strip() for _, content in blocks(text) for line in content.splitlines()]
    spans = [span.strip("`") for span in SPAN.findall(FENCE.sub("", text))]
    found = []
    for line, whole in [(line, True) for line in lines] + [(span, False) for span in spans]:
        if re.match(r"(\.venv/bin/)?segue +(?!is )[a-z-]", line):
            words = shlex.split(line.strip().partition("  ")[0], comments=True)[1:]
            found.append(([word for word in words if word != "…"], whole))
    return found


def command_faults(page: str, text: str) -> list[str]:
    """Commands that `segue` would refuse for a word or a flag; nothing is run."""
    found = []
    for words, whole in commands(text):
        top, made = parser()
        try:
            if words[0] not in made and not words[0].startswith("-"):
                raise ConfigError("no such command")
            if words[0] not in made:
                continue
            command = made[words[0]]
            if not whole:
                unknown = [w for w in words[1:] if w.startswith("--") and w not in command.words()]
            else:
                unknown = top.parse_known_args(words)[1]
            if unknown:
                raise flags.unknown(command, unknown)
        except ConfigError as exc:
            found.append(f"{page}: segue {' '.join(words)}: {exc}")
    return found


def our_words() -> str:
    """Every text in the source, one a line; a value that is filled in ends a line."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "src" / "segue").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\n".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


def sentence_faults(text: str, ours: str) -> list[str]:
    """Quoted sentences (three words or more in a span of code) that segue never says. What differs each time
    is left out there: `…`, numbers, and words in capitals."""
    found = []
    for span in (s.strip("`") for s in SPAN.findall(FENCE.sub("", text))):
        if len(span.split()) < 3 or re.match(r"(\.venv/bin/)?segue [a-z]|pip ", span):
            continue
        parts = (part.strip(" '();:,") for part in re.split(r"…|\b[A-Z]+\b|\d+|=", span))
        found += [f"{part!r} of {span!r}" for part in parts if len(part) > 3 and part not in ours]
    return found


def code_faults(text: str, codes: Iterable[ErrorCode]) -> list[str]:
    """Missing parts of the page of troubles: a section for each code, with its status and remedy."""
    sections = dict(zip(CODE_HEADING.findall(text), CODE_HEADING.split(text)[2::2], strict=True))
    known = {code.value: code for code in codes}
    found = [f"{name} is no error code" for name in sections if name not in known]
    found += [f"{name} has no heading" for name in known if name not in sections]
    found += [f"{n} has two headings" for n in known if CODE_HEADING.findall(text).count(n) > 1]
    classes = {c.code: c for c in SegueError.__subclasses__()}
    for name in sections.keys() & known.keys():
        code, section = known[name], re.split(r"^#{1,3} ", sections[name], flags=re.MULTILINE)[0]
        status = "Exit status 2" if code is ErrorCode.CONFIG else f"HTTP {status_of(code)}"
        if not re.search(rf"^{status}\b", section, re.MULTILINE):
            found.append(f"{name} does not say: {status}")
        if ("retryable" in section.splitlines()[2]) != classes[code].retryable:
            found.append(f"{name} says otherwise of whether it is retryable")
        found += [
            f"{name} does not say: {part}"
            for part in ("You see", "Cause", "What to do")
            if not re.search(rf"^- \*\*{part}\*\*: \S", section, re.MULTILINE)
        ]
    return found


def test_there_are_pages() -> None:
    assert len(PAGES) > 10
    assert sum(len(commands(page.read_text())) for page in PAGES) > 30
    assert sum(len(LINK.findall(page.read_text())) for page in PAGES) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_file_and_command_of_a_page_is_there(page: Path) -> None:
    text = page.read_text()
    faults = link_faults(page, text) + path_faults(page.name, text) + command_faults(page.name, text)
    assert faults == [], "\n".join(faults)


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    missing = [p.name for p in (ROOT / "docs").glob("*.md") if f"](docs/{p.name})" not in text]
    assert missing == []


def test_every_error_code_is_explained_with_its_status_and_what_to_do() -> None:
    faults = code_faults(TROUBLES.read_text(), ErrorCode)
    assert faults == [], "\n".join(faults)


def test_every_sentence_of_the_page_of_troubles_is_one_that_segue_says() -> None:
    text = TROUBLES.read_text()
    assert len([span for span in SPAN.findall(text) if len(span.split()) > 2]) > 60
    faults = sentence_faults(text, our_words())
    assert faults == [], "\n".join(faults)


def test_python_on_a_page_compiles() -> None:
    made = [content for page in PAGES for name, content in blocks(page.read_text()) if name == "python"]
    assert made
    for content in made:
        compile(content, "page", "exec")


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "tools", "examples"])
def test_sources_name_no_page_that_is_not_there(folder: str) -> None:
    mine = Path(__file__).resolve()
    sources = [path for path in (ROOT / folder).rglob("*.py") if path != mine]
    assert sources
    faults = [
        fault for path in sources for fault in page_faults(str(path.relative_to(ROOT)), path.read_text())
    ]
    assert faults == [], "\n".join(faults)
