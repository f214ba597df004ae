"""The dashboard as its user sees it: a real deployment in a headless Chromium.

`SCREENSHOTS=FOLDER` keeps pictures of it: light (those of docs/images), dark, and dark and narrow.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import browser
import pytest
import soak_kills
import traffic
from browser import ENTER, TAB, Browser
from cluster import Cluster
from tiny_model import VOCAB
from under_load import under_load

from segue.cli.commands.top_command import looks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not browser.installed(), reason="chromium and chromedriver are not installed"),
]

STATE = "return document.getElementById('state').innerText"
ABOUT = "return document.getElementById('about').innerText"
ROWS = "return [...document.querySelectorAll('#%s tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
#: Roles that need a name for a screen reader.
NAMED = {"button", "heading", "image", "region", "table"}
WIDTH, HEIGHT = 1200, 1100
#: The end of a picture's name, the window's width and height, dark colours.
PICTURES = (("", WIDTH, HEIGHT, False), ("-dark", WIDTH, HEIGHT, True), ("-narrow", 380, 2400, True))


def picture(page: Browser, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        for ends, width, height, dark in PICTURES:
            page.size(width, height, dark=dark)
            page.screenshot(Path(folder) / f"dashboard-{name}{ends}.webp")
        page.size(WIDTH, HEIGHT)


def test_a_user_sees_the_fleet_under_load_and_a_killed_instance(tiny: Path, tmp_path: Path) -> None:
    asks = traffic.asks(71, 40, vocab=VOCAB - 8, longest=400, max_tokens=200)
    names = ["prefill-0", "decode-0", "decode-1"]
    with Cluster(tiny, names, limits=("--drain-s", "60")) as cluster:
        with browser.browser(tmp_path) as page:
            use(page, cluster, asks)
        cluster.rest()


def use(page: Browser, cluster: Cluster, asks: list[traffic.Ask]) -> None:
    """All that a user does with the page."""
    page.size(WIDTH, HEIGHT)
    page.open(f"{cluster.url}/dashboard")
    page.until(STATE, lambda text: text == "ready")
    rows = page.until(ROWS % "replicas", lambda rows: len(rows) == 3)
    assert [row[1:5] for row in rows] == [
        ["decode", "serving", "0", "0"],
        ["decode", "serving", "0", "0"],
        ["prefill", "serving", "0", "0"],
    ]
    page.until("return document.getElementById('window').innerText", lambda text: "last" in text)
    picture(page, "idle")

    async def act(load: soak_kills.Traffic) -> None:
        await asyncio.to_thread(look, page, cluster)

    # While the page is open its sessions to the instances are, too: the rest is looked at afterwards.
    report = asyncio.run(under_load(cluster.url, asks, act, clients=32, rest=dict))
    assert report.failed == {}
    # The page still lives from its events after all of this.
    page.until(STATE, lambda text: text == "ready")
    assert page.complaints() == []


def look(page: Browser, cluster: Cluster) -> None:
    """What a user does while 32 clients stream."""
    links = page.until(ROWS % "links", lambda rows: len(rows[0]) > 1 and int(rows[0][5]) > 0)
    assert {row[2] for row in links} == {"shm"}
    page.until(ROWS % "replicas", lambda rows: sum(int(row[3]) for row in rows if len(row) > 3) > 0)
    page.until("return document.getElementById('numbers').innerText", lambda text: "p50" in text)
    parts = page.until(
        "return document.getElementById('parts-key').innerText", lambda text: "prefill" in text
    )
    assert "transfer" in parts
    drawing = page.run("return document.querySelector('#picture svg').getAttribute('aria-label')")
    assert drawing.startswith("1 frontends, 1 prefill instances, 2 decode")
    picture(page, "streams")

    # Each element with one of these roles has a name for a screen reader.
    nodes = page.devtools("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node["name"]["value"]) for node in nodes if "name" in node]
    assert {role for role, name in named if role in NAMED and name} == NAMED
    assert [role for role, name in named if role in NAMED and not name] == []

    # By keyboard alone: the page pauses, while others look on, and resumes.
    page.run("document.activeElement.blur()")
    page.keys(TAB + ENTER)
    page.until(STATE, lambda text: text == "paused")
    shown = page.run(ABOUT)
    with contextlib.closing(looks(cluster.url, {})) as others:
        for _ in range(3):
            next(others)
    assert (page.run(STATE), page.run(ABOUT)) == ("paused", shown)
    page.keys(ENTER)
    page.until(STATE, lambda text: text == "ready")

    # From the first button of the list to a timeline and back.
    page.until(ROWS % "requests", lambda rows: len(rows) > 3)
    page.run("document.querySelector('[data-request]').focus()")
    name = page.run("return document.activeElement.dataset.request")
    page.keys(ENTER)
    steps = page.until(
        "return [...document.querySelectorAll('#life-text td:first-child')].map(c => c.innerText)"
    )
    assert {"attempt"} <= set(steps), steps
    assert page.run("return document.getElementById('life-name').innerText") == f"Request {name}"
    picture(page, "timeline")
    page.keys(ENTER)
    page.until("return !document.getElementById('life').open")
    assert page.run("return document.activeElement.dataset.request"), "the focus is in the list again"
    for _ in range(5):  # of the two that the list had, one may have ended between the keys
        page.until(ROWS % "requests", lambda rows: len(rows) > 3)
        page.run("document.querySelector('[data-request]').focus()")
        page.keys(TAB)
        if second := page.run("return document.activeElement.dataset.request"):
            break
    assert second

    # On a narrow screen nothing but tables scrolls sideways; in the dark it is dark.
    light = page.run("return getComputedStyle(document.body).backgroundColor")
    page.size(360, 1600, dark=True)
    widths = page.run("return [document.scrollingElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    assert page.run("return getComputedStyle(document.body).backgroundColor") != light
    page.size(WIDTH, HEIGHT)

    # A killed instance is seen as one, and the rest goes on.
    victim = cluster.parts.pop("decode-1")
    victim.kill()
    page.until(
        ROWS % "replicas",
        lambda rows: [row[2] for row in rows].count("serving") == 2,
    )
    picture(page, "killed")
