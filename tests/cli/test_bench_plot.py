"""The pictures of `segue bench`."""

import sys
from pathlib import Path

import pytest

from segue.cli.bench.plot import histogram, write_png
from segue.cli.bench.stats import RequestTimes
from segue.cli.main import main
from segue.kv.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([], "    "),
        ([0.0], "    "),
        ([1.0], "   █"),
        ([0.05, 0.05, 0.05, 0.05, 0.4], "█  ▂"),
        ([0.05] * 1000 + [0.4], "█  ▁"),
        ([0.05, 0.15, 0.25, 0.4], "████"),
    ],
)
def test_a_range_with_a_value_has_a_bar(values: list[float], shown: str) -> None:
    assert histogram(values, 4) == shown


def test_without_matplotlib_one_sentence_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "http://127.0.0.1:1", "--plot", "x.png"]) == 2
    said = capsys.readouterr().err
    assert "pip install 'segue[plot]'" in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_png_of_requests_that_ended_well_and_others(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    samples = [RequestTimes([0.1, 0.2], 0.2, tokens=2), RequestTimes([0.1], 0.1, tokens=1, start_s=0.1)]
    samples.append(RequestTimes([], 0.1, error="http_429", start_s=0.3))
    for kept in (samples, samples[2:]):
        file = tmp_path / f"{len(kept)}.png"
        write_png(str(file), kept, "tiny")
        assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ConfigError, match=r"--plot .* cannot be written: No such file"):
        write_png(str(tmp_path / "none" / "x.png"), samples, "tiny")
