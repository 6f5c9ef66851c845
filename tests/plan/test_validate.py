"""A table of measured runs is read as its sources mean it, and errors are summed up as they say."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from stretto.errors import JobError
from stretto.plan.published import Run, Skipped, read_runs
from stretto.plan.validate import by_source, foretell, table, validate

COLUMNS = [
    "source", "model_name", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "gated_mlp", "vocab", "seq",
    "experts", "topk", "gpu", "gpus", "dp", "tp", "sp", "pp", "vpp", "cp", "ep", "zero_stage", "micro_batch",
    "global_batch", "recompute", "precision", "framework", "measured_step_s", "measured_tokens_per_s_per_gpu",
    "measured_tflops_per_gpu", "measured_mfu_pct", "measured_mem_gb_per_gpu", "flops_convention", "notes",
]  # fmt: skip
#: Narayanan et al. 2021, arXiv 2104.04473, Table 1: GPT-18B on 256 A100.
GPT18 = {
    "source": "Narayanan et al. 2021 (arXiv 2104.04473) Table 1", "model_name": "GPT-18B", "layers": "40", "hidden": "6144", "heads": "48",
    "kv_heads": "48", "ffn_hidden": "24576", "gated_mlp": "0", "vocab": "51200", "seq": "2048", "gpu": "A100-80GB-SXM", "gpus": "256",
    "dp": "32", "tp": "8", "sp": "0", "pp": "1", "zero_stage": "0", "micro_batch": "8", "global_batch": "1024", "recompute": "full",
    "precision": "fp16", "framework": "Megatron-LM", "measured_tflops_per_gpu": "135", "flops_convention": "Narayanan eq.3", "cp": "1",
}  # fmt: skip
#: Korthikanti et al. 2022, arXiv 2205.05198, Table 5: GPT-3 175B on 64 A100.
GPT175 = {
    "source": "Korthikanti et al. 2022 (arXiv 2205.05198) Table 5", "model_name": "GPT3-175B", "layers": "96", "hidden": "12288",
    "heads": "96", "kv_heads": "96", "ffn_hidden": "49152", "gated_mlp": "0", "vocab": "51200", "seq": "2048", "gpu": "A100-80GB-SXM",
    "gpus": "64", "dp": "1", "tp": "8", "sp": "1", "pp": "8", "vpp": "3", "zero_stage": "0", "micro_batch": "1", "global_batch": "64",
    "recompute": "selective", "precision": "fp16", "framework": "Megatron-LM", "measured_step_s": "13.75", "cp": "1",
}  # fmt: skip
#: SimuMax docs/b200, release v1.2: 12 blocks of Llama 3 70B on 8 B200.
LLAMA12 = {
    "source": "MooreThreads/SimuMax docs/b200", "model_name": "llama3_70b 12-layer slice", "layers": "12", "hidden": "8192", "heads": "64",
    "kv_heads": "8", "ffn_hidden": "28672", "gated_mlp": "1", "vocab": "128256", "seq": "4096", "gpu": "B200-SXM", "gpus": "8", "dp": "4",
    "tp": "2", "sp": "1", "pp": "1", "vpp": "1", "cp": "1", "zero_stage": "1", "micro_batch": "1", "global_batch": "16",
    "recompute": "none", "precision": "bf16", "framework": "Megatron-LM 0.14-era + TE 2.11",
    "measured_step_s": "0.7255", "measured_mem_gb_per_gpu": "60.68",
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path):
    def write(*rows: dict[str, str]) -> Path:
        path = tmp_path / "rows.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="")
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


def test_a_rate_becomes_seconds_by_its_sources_own_way_of_counting(written) -> None:
    """96 B s L h^2 (1 + s/6h + V/16Lh) flops (Narayanan et al. 2021, equation 3) at 135 tera flops on each of 256 devices."""
    [run] = read_runs(written(GPT18))
    assert isinstance(run, Run)
    B, s, L, h, V = 1024, 2048, 40, 6144, 51200
    assert run.seconds == pytest.approx(96 * B * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h)) / 256 / 135e12, rel=1e-3)


def test_a_row_says_its_mesh_and_its_stack(written) -> None:
    a, b, c = read_runs(written(GPT18, GPT175, LLAMA12))
    assert isinstance(a, Run) and isinstance(b, Run) and isinstance(c, Run)
    assert [str(run.setting.mesh) for run in (a, b, c)] == ["dp=32 tp=8", "pp=8 tp=8", "dp=4 tp=2"]
    assert [run.setting.microbatches for run in (a, b, c)] == [4, 64, 4]
    assert (b.setting.schedule, b.setting.chunks, b.setting.sequence) == ("interleaved", 3, True)
    assert [run.software.name for run in (a, b, c)] == ["Megatron-LM 2021", "Megatron-LM 2022", "Megatron-Core, no overlap"]
    assert [run.line for run in (a, b, c)] == [2, 3, 4]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layers": ""}, "layers is not stated"),
        ({"dp": "16"}, "is 128, not the 256 devices"),
        ({"gpu": "Abacus"}, "Abacus is not known"),
        ({"framework": "notes on paper"}, "notes on paper behaves is not known"),
        ({"measured_tflops_per_gpu": ""}, "neither time nor memory"),
        ({"pp": "64", "dp": "4", "tp": "1"}, "do not fill 64 stages"),
        ({"experts": "8"}, "how many experts"),
    ],
)
def test_a_row_that_says_too_little_is_skipped_with_the_reason(written, change: dict[str, str], why: str) -> None:
    [row] = read_runs(written(GPT18 | change))
    assert isinstance(row, Skipped) and why in row.why


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be read"):
        read_runs(tmp_path / "nothing.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(JobError, match="has no column source"):
        read_runs(tmp_path / "other.csv")


def test_three_published_runs_are_foretold_within_a_tenth(written) -> None:
    verdicts = foretell(read_runs(written(GPT18, GPT175, LLAMA12)))
    assert all(abs(v.error or 0.0) < 0.1 for v in verdicts)
    assert abs(verdicts[2].memory_error or 1.0) < 0.02


def test_scores_are_the_errors_summed_up(written) -> None:
    """Twice the same run, said to have taken half as long the second time: errors e and 1 + 2e; one factor mends neither."""
    slow, fast = read_runs(written(GPT175, GPT175 | {"measured_step_s": "6.875", "micro_batch": "1"}))
    score = by_source(foretell([slow, fast]))["Korthikanti T5"]
    e = (score.bias - 50) / 1.5
    assert (score.n, score.max) == (2, pytest.approx(100 + 2 * e, rel=1e-6))
    assert score.scaled_mape == pytest.approx(100 * ((1 - 0.5**0.5) + (2**0.5 - 1)) / 2, rel=1e-6)
    assert (score.ordered, score.rank_correlation) == (50, None)  # foretold alike: as good as a coin


def test_the_result_holds_a_row_for_every_line(written) -> None:
    found = validate([written(GPT18, GPT175 | {"heads": ""}, LLAMA12)])
    rows = found["rows"]
    assert isinstance(rows, list)
    assert [row["line"] for row in rows] == [2, 3, 4]
    assert [bool(row["skipped"]) for row in rows] == [False, True, False]
    assert rows[2]["predicted_bytes"] and rows[2]["measured_bytes"] == pytest.approx(60.68 * 2**30)
    assert (found["foretold"], found["skipped"]) == (2, 1)
    text = table(found)
    assert "mean of 2 sources" in text and "heads is not stated" in text
