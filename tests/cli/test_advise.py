"""`segue advise`: what it asks for, what a model costs by its description, what it prints and writes."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from segue.cli.main import main
from segue.kv.errors import ConfigError
from segue_lab.advise.costs import ForwardWork, RowsPoint, StepTimes, TimedForward, pairs
from segue_lab.advise.queues import HandOffWire
from segue_lab.commands import advise_model
from segue_lab.commands.advise import MeasuredMachine
from segue_lab.commands.advise_report import AdviseReport

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
MIXTRAL: dict[str, Any] = LLAMA_8B | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
GPU = ["--compute-tflops", "400", "--memory-gb-per-s", "2600", "--wire", "rdma=40,15", "--wire", "tcp=5"]
LOAD = ["--rate", "10", "--input-tokens", "2000", "--output-tokens", "50"]
#: How a machine was measured.
STEPS = StepTimes(curve=(RowsPoint(1, 0.01), RowsPoint(128, 0.1)), pair_s=1e-7, context_s=1e-8)


def folder(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    works = [
        ForwardWork(sequences=1, context=64),
        ForwardWork(sequences=1, context=640),
        *(ForwardWork(prompt_tokens=128, pairs=pairs(start, 128)) for start in (0, 512)),
    ]
    machine = MeasuredMachine(
        model="tiny",
        dtype="bfloat16",
        threads=1,
        kv_token_bytes=1000,
        state_bytes=0,
        context_tokens=4096,
        forwards=tuple(TimedForward(work=w, samples=(STEPS.seconds(w),)) for w in works),
        wires=(HandOffWire(name="shm", bytes_per_s=5e9, latency_s=1e-4),),
    )
    file = tmp_path / "machine.json"
    file.write_bytes(msgspec.json.encode(machine))
    return file


@pytest.mark.parametrize(
    ("config", "active", "everything", "kv_bytes"),
    [
        (LLAMA_8B, 7.0e9, 7.5e9, 131072),  # without the table of embeddings, of which only rows are read
        (MIXTRAL, 12.6e9, 46.6e9, 131072),
        (DEEPSEEK_V3, 35.6e9, 670.1e9, 2 * 61 * 576),
    ],
)
def test_a_models_costs_are_those_that_its_makers_name(
    tmp_path: Path, config: dict[str, Any], active: float, everything: float, kv_bytes: int
) -> None:
    costs = advise_model.costs(folder(tmp_path, config), "bfloat16")
    assert costs.parameters == pytest.approx(active, rel=0.02)
    assert (costs.weight_bytes + costs.expert_bytes) / 2 == pytest.approx(everything, rel=0.01)
    assert costs.kv_token_bytes == kv_bytes


def test_a_model_may_be_named_by_its_folder_or_its_description(tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA_8B)
    assert advise_model.found(str(model)) == advise_model.found(str(model / "config.json")) == model
    with pytest.raises(ConfigError, match="no model of the Hub that is on this machine; give --parameters"):
        advise_model.found("nobody/has-this-one")


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"model_type": "mamba"}, "cannot tell the costs of models of type 'mamba'"),
        ({"model_type": "lfm2"}, "type 'lfm2' (deepseek_v2, deepseek_v3, gemma3_text, llama, mistral"),
        ({"hidden_size": None}, "does not say"),
        ({"intermediate_size": "x"}, "does not say"),
    ],
)
def test_a_description_that_does_not_do_is_refused_with_the_way_out(
    tmp_path: Path, change: dict[str, Any], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", str(folder(tmp_path, LLAMA_8B | change)), *GPU, *LOAD]) == 2
    said = capsys.readouterr().err
    assert fragment in said
    assert "give --parameters and --kv-bytes-per-token in its place" in said


@pytest.mark.slow
def test_advice_from_figures_is_a_table_a_plot_and_the_transports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = folder(tmp_path, LLAMA_8B), tmp_path / "out.json"
    targets = ["--slo-ttft-ms", "1000", "--slo-itl-ms", "30", "--workers", "2"]
    assert main(["advise", str(model), *GPU, *LOAD, *targets, "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "1 + 1",
        "2 unified",
        "KV of a request: 262 MB",
        "rdma (taken)",
        "first token, p99 ms",
        "····",
    ):
        assert part in shown
    report = msgspec.json.decode(out.read_bytes(), type=AdviseReport)
    assert report.kv_bytes_per_request == 2000 * 131072
    rdma, tcp = report.wires
    assert (rdma.wire_ms, tcp.wire_ms) == pytest.approx((262.144 / 40 + 0.015, 262.144 / 5))
    # Only the last of four chunks crosses after the last forward: a chunk crosses before the next is there.
    assert rdma.exposed_ms == pytest.approx(464 * 131072 / 40e6 + 0.015)
    assert report.advice.split is not None
    assert len(report.advice.candidates) == 4


def test_a_measurement_is_read_and_its_own_error_is_told(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rate", "1", "--input-tokens", "256", "--workers", "1"]
    assert main(["advise", "--measured", str(measured), *words]) == 0
    shown = capsys.readouterr().out
    assert "do not disaggregate: 1 unified worker" in shown
    assert "misses measured forwards by at most 0%" in shown
    assert main(["advise", "--measured", str(measured), *words, "--json"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=AdviseReport)
    found = report.advice.candidates[0].expected
    assert found is not None
    assert found.ttft_p50_s == pytest.approx(0.2 + 1e-7 * pairs(0, 256), rel=0.5)


def test_sizes_may_stand_in_for_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--parameters", "70e9", "--kv-bytes-per-token", "327680"]
    assert main(["advise", *sizes, *GPU, "--rate", "0.5", "--workers", "2", "--json"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=AdviseReport)
    assert report.steps.products(1) == pytest.approx(140e9 / 2.6e12)


def test_what_no_number_of_workers_can_do_is_said_with_status_1(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", "--measured", str(measured), "--rate", "1", "--slo-itl-ms", "5"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("no number of workers will do")
    assert "faster ones do" in shown
    assert main(["advise", "--measured", str(measured), "--rate", "1000", "--workers", "2"]) == 1
    assert capsys.readouterr().out.startswith("too few workers")


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["m", "--rate", "1"], "say how fast a worker is: --measure"),
        (["m", *GPU, "--measured", "f", "--rate", "1"], "one of the three"),
        (["m", "--compute-tflops", "1", "--wire", "x=1", "--rate", "1"], "go together: one bounds prompts"),
        (["m", *GPU[:4], "--rate", "1"], "say how KV would move: --wire NAME=GB/S"),
        (["m", *GPU[:4], "--wire", "x=fast", "--rate", "1"], "--wire must look like rdma=40"),
        (["m", *GPU[:4], "--wire", "x=0", "--rate", "1"], "--wire must look like rdma=40"),
        (["m", *GPU], "--rate (requests a second) or --concurrency, not both"),
        (["m", *GPU, "--rate", "1", "--concurrency", "1"], "not both"),
        (["m", *GPU, "--concurrency", "4"], "any number of workers will do; give --workers, or a target"),
        (["m", *GPU, "--rate", "nan"], "--rate must be between"),
        (["m", *GPU, "--rate", "1", "--workers", "65"], "--workers must be between 1 and 64, not 65"),
        (["m", *GPU, "--rate", "1", "--save", "f"], "add --measure"),
        (["m", *GPU, "--rate", "1", "--input-tokens", "9-5"], "--input-tokens must be a length (512)"),
        ([*GPU, "--rate", "1"], "name a MODEL, or give --parameters"),
        ([*GPU, "--rate", "1", "--parameters", "1e9"], "--parameters and --kv-bytes-per-token go together"),
        (["m", *GPU, *LOAD], "m is no folder with a config.json"),
        (["--measured", "/nowhere.json", "--rate", "1"], "--measured /nowhere.json cannot be read"),
        (["m", "--measured", "f", "--rate", "1"], "has its own model; leave MODEL out"),
        (["m", *GPU, "--rat", "1"], "does not know --rat"),
    ],
)
def test_a_wrong_question_is_one_sentence_that_says_what_to_change(
    words: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *words]) == 2
    captured = capsys.readouterr()
    assert fragment in captured.err
    assert captured.err.count("\n") == 1


def test_a_file_that_is_no_measurement_and_sequences_that_do_not_fit_are_refused(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"model": 1}')
    taken = ["advise", "--measured", str(measured), "--rate", "1"]
    for words, fragment in (
        (["advise", "--measured", str(other), "--rate", "1"], "is not what segue advise --save writes"),
        ([*taken, "--input-tokens", "5000"], "longer than the model's context of 4096"),
        ([*taken, "--kv-gib", "0.0005"], "needs more KV than one worker holds"),
        ([*taken, "--transport", "rdma"], "--transport rdma is none of those known: shm"),
        ([*taken, "--json", "/nowhere/x"], "--json /nowhere/x cannot be written"),
    ):
        assert main(words) == 2
        assert re.search(re.escape(fragment), capsys.readouterr().err)
