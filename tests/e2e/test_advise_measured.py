"""`segue advise --measure` with a real engine and real transports, on a tiny random model."""

from pathlib import Path

import msgspec
import pytest

from segue.cli.main import main
from segue_lab.commands.advise import MeasuredMachine
from segue_lab.commands.advise_report import AdviseReport


@pytest.mark.slow
def test_a_machine_is_measured_once_and_asked_many_times(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machine.json"
    ask = ["--rate", "0.5", "--input-tokens", "64", "--output-tokens", "8", "--workers", "2", "--json"]
    main(["advise", str(tiny), "--measure", "--save", str(file), *ask])
    first = msgspec.json.decode(capsys.readouterr().out, type=AdviseReport)
    machine = msgspec.json.decode(file.read_bytes(), type=MeasuredMachine)
    # Keys and values of 2 layers, 2 heads and 16 numbers, in the type that this processor multiplies.
    assert machine.kv_token_bytes == 2 * 2 * 2 * 16 * (2 if machine.dtype == "bfloat16" else 4)
    assert {"shm", "tcp"} <= {wire.name for wire in machine.wires}
    assert {len(timed.samples) for timed in machine.forwards} == {7, 28}
    main(["advise", "--measured", str(file), *ask])
    again = msgspec.json.decode(capsys.readouterr().out, type=AdviseReport)
    assert (again.advice, again.steps) == (first.advice, first.steps)
    assert 0 < first.steps.products(1) <= first.steps.products(512)
