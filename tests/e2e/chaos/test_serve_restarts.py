"""Children of `segue serve` that are killed, one after the other, while clients stream."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import traffic
from served import Served
from test_serve_restart import SERVE, assert_nobody_notices, kill, results_of, serving
from tiny_model import VOCAB

pytestmark = [pytest.mark.timeout(400)]


def test_the_only_prefill_and_then_the_only_decode_are_killed(tiny: Path) -> None:
    with serving(tiny) as served:
        # Long prompts, so that some of them wait for prefill when it dies.
        assert_nobody_notices(served, "prefill-0", longest=3000, max_tokens=40)
        assert_nobody_notices(served, "decode-0")
        assert served.stop() == 0


@pytest.mark.soak
def test_a_unified_instance_and_one_of_two_ranks_are_killed(tiny: Path) -> None:
    with serving(tiny, "--unified") as served:
        assert_nobody_notices(served, "unified-0")
    with serving(tiny, "--prefill-tp", "2") as served:
        assert_nobody_notices(served, "prefill-0", longest=3000, max_tokens=40)
        [rank] = served.instances("segue.server.instance.rank_process")
        rank.kill()
        served.logged(re.compile("event=serves_again child=prefill-0"), 2)
        assert_nobody_notices(served, "decode-0")


def test_a_dp_rank_is_killed_and_its_instance_comes_back_whole(tiny: Path) -> None:
    with serving(tiny, "--decode-dp", "2") as served:
        asks = traffic.asks(5, 4, vocab=VOCAB - 8, longest=300, max_tokens=600)
        before = results_of(served.url, asks)
        after = results_of(served.url, asks, lambda: kill(served, "decode-0.dp1"))
        assert [(r.error, r.tokens) for r in after] == [("", r.tokens) for r in before]
        served.logged(re.compile("event=serves_again child=decode-0"))
        assert len(served.instances("decode")) == 2
        assert served.stop() == 0


def test_the_frontend_is_killed_and_serves_at_the_same_port(tiny: Path) -> None:
    with serving(tiny) as served:
        asks = traffic.asks(5, 4, vocab=VOCAB - 8, longest=300, max_tokens=200)
        before = results_of(served.url, asks)
        kill(served, "frontend")
        served.logged(re.compile("event=serves_again child=frontend"))
        after = results_of(served.url, asks)
        assert [(r.error, r.tokens) for r in after] == [("", r.tokens) for r in before]
        assert served.stop() == 0


def test_an_instance_that_cannot_start_again_ends_the_service_with_the_reason(
    tiny: Path, tmp_path: Path
) -> None:
    """Its model is gone. Who waits hears it at once, and does not wait for its own deadline."""
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    served = Served("--model", str(folder), "--served-model-name", "tiny", *SERVE)
    with served:
        asks = traffic.asks(5, 4, vocab=VOCAB - 8, longest=300, max_tokens=2000)

        def lost() -> None:
            (folder / "model.safetensors").unlink()
            kill(served, "decode-0")

        results = results_of(served.url, asks, lost)
        assert {r.error for r in results} == {"BOOTSTRAP_UNREACHABLE"}
        assert all("ask another" not in r.text for r in results)
        assert served.process.wait(60) == 1
        assert "segue: decode-0 was started again 5 times within 60 s of service" in served.log()
        assert "Traceback" not in served.log().split("segue: decode-0 was started again")[1]
        served.forget()
