"""`zerolora bench` without training: cases, the run they become, tokens of the others, tables, and mistakes."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.bench.__main__ import Bench, _parse, main
from benchmarks.bench.assignment import Assignment
from benchmarks.bench.cases import AS_CONFIGURED, CASES, build_peer_case, count_texts, prepared, resolve, write_texts
from benchmarks.bench.floor import Experts as ExpertsShape
from benchmarks.bench.floor import _time_grouped, measure_floor
from benchmarks.bench.peers import missing_package
from benchmarks.bench.report import (
    PRODUCT,
    Measurement,
    build_profile_table,
    build_result_table,
    list_failures,
    set_peers_mfu,
)
from benchmarks.bench.trace import ADAPTER, ATTENTION, CATEGORIES, FROZEN, HEAD, IDLE, NORMS
from benchmarks.bench.unsloth import draw_weights, write_sparse_checkpoint
from tests.mixtures import make_mixture
from trainer.config import load_config
from trainer.data.cache import prepare_data
from trainer.data.samples import Samples

SETTINGS = ["dataset.max_length=64", "training.batch_size=3"]


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_a_short_run_of_the_product_as_it_is(tmp_path: Path, case: str) -> None:
    run, base_model = resolve(None, case, "tiny", SETTINGS, tmp_path)
    texts = write_texts(tmp_path / "texts.jsonl", 64, 12)
    config = load_config(prepared(run, base_model, texts, tmp_path, steps=7, profile=False)).config
    assert config.base_model == "random:tiny"
    assert (config.adapter == "qlora") == case.startswith(("nf4", "fp8", "int8"))
    assert (config.training.gradient_checkpointing != "none") == ("recompute" in case or "selective" in case)
    assert config.training.offload_activations == ("offload" in case)
    assert config.training.max_steps == 7
    assert config.scu.enabled and config.scu.controller == "pi"
    assert config.dataset.packing and "tensorboard" in config.logging.report_to
    assert config.zero == run.zero and config.ops == run.ops and config.lora == run.lora


def test_a_configuration_keeps_its_settings_and_loses_its_data(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "base_model: meta-llama/Llama-2-7b-chat-hf\noutput_dir: runs/x\nlora_r: 8\n"
        "dataset: {path: nowhere.jsonl, val_split: 0.1, max_length: 96}\n"
        "training: {batch_size: 2, eval_steps: 10, best_checkpoint: true, early_stopping: 3, optimizer: adamw_8bit}\n"
        "logging: {sample_prompts: [hello]}\n"
    )
    run, base_model = resolve(own, AS_CONFIGURED, None, ["zero.stage=1"], tmp_path)
    texts = write_texts(tmp_path / "texts.jsonl", 96, 12)
    config = load_config(prepared(run, base_model, texts, tmp_path, steps=5, profile=True)).config
    assert base_model == "random:llama2-7b"
    assert (config.lora.r, config.zero.stage, config.training.optimizer) == (8, 1, "adamw_8bit")
    assert config.training.eval_steps == 0 and config.training.early_stopping is None
    assert config.dataset.val_split == 0 and config.logging.sample_prompts == ()
    assert config.logging.profile_steps > 1
    assert config.training.max_steps == 5 + config.logging.profile_steps


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--case", "bf17"], "--case bf17: unknown case; choose from bf16"),
        (["--shape", "llama9"], "--shape llama9: unknown shape; choose from tiny"),
        (["base_model=runs/own"], "base_model=runs/own: its shape is unknown; set it with --shape"),
        (["adapter=none", "scu.enabled=false"], "adapter=none: bench measures adapters"),
        (["training.batch=3"], "training.batch"),
        (["missing.yaml"], "missing.yaml: no such file"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert problem in captured.err
    assert captured.out == ""


def test_recurrent_shapes_are_recomputed_unless_that_is_turned_off(tmp_path: Path) -> None:
    run, _ = resolve(None, AS_CONFIGURED, "granite-4.0-h-1b,num_hidden_layers=2,layer_types=null", [], tmp_path)
    assert run.dataset.packing and run.training.gradient_checkpointing == "non_reentrant"
    again, _ = resolve(None, "nf4", "granite-4.0-h-1b", ["training.gradient_checkpointing=none"], tmp_path)
    assert (again.adapter, again.training.gradient_checkpointing) == ("qlora", "none")
    usual, _ = resolve(None, AS_CONFIGURED, "tiny", [], tmp_path)
    assert usual.training.gradient_checkpointing == "none"


def test_the_others_get_the_tokens_that_the_product_trains_on(tmp_path: Path) -> None:
    from trainer.model.base import load_tokenizer

    run, base_model = resolve(None, AS_CONFIGURED, "tiny", SETTINGS, tmp_path)
    texts = write_texts(tmp_path / "texts.jsonl", 64, 12)
    config = load_config(prepared(run, base_model, texts, tmp_path, steps=2, profile=False)).config
    tokenizer = load_tokenizer(base_model, config.model)
    data = prepare_data(config.dataset, tokenizer, seed=0, cache_dir=tmp_path / "cache", model_max_length=2048)
    case = build_peer_case("x", run, base_model, on_gpu=False, batch_size=3)
    batches = Assignment([case], str(texts), warmup=1, steps=1, folder=str(tmp_path)).batches(case)
    assert batches.shape == (2, 3, 64)
    assert isinstance(data.train, Samples)
    assert [sample.input_ids for sample in list(data.train)[:6]] == batches.flatten(0, 1).tolist()
    assert data.stats.packing_efficiency == 1.0
    assert data.stats.samples == data.stats.documents


def test_a_checkpoint_of_holes_loads_and_takes_no_room(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_sparse_checkpoint("random:tiny,hidden_size=512", tmp_path)
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > 2_000_000
    assert file.stat().st_blocks * 512 < 100_000
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.hidden_size == 512
    assert not any(parameter.any() for parameter in model.parameters())
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "</s>"


@pytest.mark.parametrize("nested", [True, False])
def test_weights_in_4_bits_are_those_of_a_normal_distribution(nested: bool) -> None:
    import bitsandbytes
    from bitsandbytes.functional import dequantize_4bit

    layer = bitsandbytes.nn.Linear4bit(256, 512, bias=False, quant_type="nf4", compress_statistics=nested)
    layer.weight = bitsandbytes.nn.Params4bit(
        torch.zeros(512, 256), requires_grad=False, quant_type="nf4", compress_statistics=nested
    )
    layer.to("cpu")  # quantises
    draw_weights(layer)
    values = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    assert values.std().item() == pytest.approx(0.02, rel=0.02)
    # Every block has a largest value of its own, so there are many more than the 16 of the code.
    assert values.unique().numel() > 500
    assert values.abs().max() > 3 * 0.02


def test_no_step_is_the_short_last_one_of_an_epoch(tmp_path: Path) -> None:
    run, _ = resolve(None, AS_CONFIGURED, "tiny", ["training.gradient_accumulation_steps=2", *SETTINGS], tmp_path)
    assert count_texts(run, steps=10, ranks=4) >= 10 * 3 * 2 * 4
    run, _ = resolve(None, AS_CONFIGURED, "tiny", ["training.batch_size=auto"], tmp_path)
    assert count_texts(run, steps=10, ranks=1) >= 10


def test_what_is_not_installed_is_named_with_its_way_in(tmp_path: Path) -> None:
    assert missing_package("peft") is None
    assert missing_package("peft-liger") in (None, "not installed: pip install liger-kernel")
    # It cannot be installed next to zerolora's datasets, so it has its own folder.
    assert "--peer-packages unsloth=FOLDER" in (missing_package("unsloth") or "--peer-packages unsloth=FOLDER")
    assert "--peer-packages axolotl=FOLDER" in (missing_package("axolotl") or "--peer-packages axolotl=FOLDER")
    (tmp_path / "unsloth").mkdir()
    (tmp_path / "unsloth" / "__init__.py").touch()
    assert missing_package("unsloth", str(tmp_path)) is None
    (tmp_path / "axolotl").mkdir()
    (tmp_path / "axolotl" / "__init__.py").touch()
    assert missing_package("axolotl", str(tmp_path)) in (None, "not installed: pip install triton")


def test_the_others_do_not_report_their_use(tmp_path: Path) -> None:
    bench = Bench(_parse([]), [], tmp_path, Console(file=io.StringIO()))
    program = "import os; print([os.environ[name] for name in ('DO_NOT_TRACK', 'UNSLOTH_DISABLE_STATISTICS')])"
    assert bench._call("peer", [sys.executable, "-S", "-c", program], tmp_path / "log") == ""
    assert (tmp_path / "log").read_text().strip() == "['1', '1']"


def records(*step_ms: float) -> list[dict[str, Any]]:
    return [
        {"perf/step_ms": ms, "perf/tokens_per_second_per_gpu": 8192e3 / ms, "perf/mfu": 0.5, "memory/peak_gib": 40.0}
        for ms in step_ms
    ]


def text_of(table: Any) -> str:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_the_table_compares_medians_within_a_case() -> None:
    results = [
        Measurement.from_records("bf16", records(500.0, 400.0, 900.0), {}),
        Measurement.from_records("nf4", records(600.0), {}),
        Measurement("bf16", "unsloth", step_ms=[1000.0, 1000.0], tokens=8192, peak_gib=46.0),
        Measurement("bf16", "peft", note="not installed: pip install peft"),
        Measurement("nf4", "peft", note="not installed: pip install peft"),
        Measurement("nf4", "unsloth", error="OutOfMemoryError: of 3 GiB"),
    ]
    set_peers_mfu(results)
    product, unsloth = results[0], results[2]
    assert (product.median_ms, product.rate) == (500.0, pytest.approx(16384.0))
    assert unsloth.mfu == pytest.approx(0.25)
    rows = [line.split() for line in text_of(build_result_table(results)).splitlines()]
    assert rows[1] == ["bf16", "zerolora", "16,384", "500.0", "400.0", "to", "900.0", "50.0%", "40.0", "1.00"]
    assert rows[2] == ["bf16", "Unsloth", "8,192", "1,000.0", "1,000.0", "to", "1,000.0", "25.0%", "46.0", "2.00"]
    assert rows[3][:2] == ["nf4", "zerolora"]
    assert list_failures(results) == [
        "PEFT: not installed: pip install peft",
        "nf4: Unsloth OutOfMemoryError: of 3 GiB",
    ]
    assert json.loads(json.dumps(product.as_json()))["tokens_per_second_per_gpu"] == pytest.approx(16384.0)


def test_a_run_without_measured_steps_is_an_error() -> None:
    assert Measurement.from_records("bf16", [], {}).error
    assert Measurement("bf16", PRODUCT).rate is None


def test_the_profile_shows_the_gap_to_the_floor() -> None:
    by_category = dict.fromkeys(CATEGORIES, 0.0) | {FROZEN: 90.0, IDLE: 10.0}
    profile = {"step_ms": 100.0, "by_category_ms": by_category, "floor_ms": {FROZEN: 80.0}}
    lines = [line.split() for line in text_of(build_profile_table(profile)).splitlines()]
    assert ["frozen", "products", "90.0", "90.0%", "80.0", "+10.0"] in lines
    assert ["idle", "10.0", "10.0%", "+10.0"] in lines
    assert lines[-1] == ["step", "100.0", "80.0", "+20.0"]


def test_the_floor_is_measured_on_this_machine() -> None:
    floor = measure_floor("random:tiny", batch_size=2, length=64, rank=4, recompute=0.0, device=torch.device("cpu"))
    assert set(floor) < set(CATEGORIES)
    assert all(value > 0 for value in floor.values())


def test_the_floor_counts_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a millisecond for each: q, k, v together, o, gate and up together, down, in two layers, both ways."""
    monkeypatch.setattr("benchmarks.bench.floor._median", lambda *_: 1.0)
    settings: dict[str, Any] = {"batch_size": 2, "length": 64, "rank": 4, "device": torch.device("cpu")}
    plain, again = (measure_floor("random:tiny", recompute=share, **settings) for share in (0.0, 1.0))
    assert (plain[FROZEN], again[FROZEN]) == (2 * 4 * 2, 2 * 4 * 3)
    assert (plain[ATTENTION], again[ATTENTION]) == (2 * 1.0, 2 * 2.0)
    assert plain[HEAD] == again[HEAD] > 2.0
    assert plain[ADAPTER] == again[ADAPTER] > 0
    assert plain[NORMS] < again[NORMS] < 2 * plain[NORMS]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen2_moe", "llama4_text"])
def test_the_floor_of_a_mixture_has_its_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count in two layers each the products into the experts and out of them, and the linear layers."""
    timed: list[tuple[Any, tuple[int, int]]] = []

    def time_grouped(tokens: int, layer: ExpertsShape, product: tuple[int, int], *_: Any) -> tuple[float, float]:
        timed.append((layer, product))
        return 1.0, 2.0

    monkeypatch.setattr("benchmarks.bench.floor._median", lambda *_: 1.0)
    monkeypatch.setattr("benchmarks.bench.floor._time_grouped", time_grouped)
    base = str(make_mixture(tmp_path, name))
    settings: dict[str, Any] = {"batch_size": 2, "length": 64, "rank": 4, "device": torch.device("cpu")}
    once, again = (measure_floor(base, recompute=share, **settings) for share in (0.0, 1.0))
    visited = 4 if name == "llama4_text" else 2
    width = 32 if name == "qwen2_moe" else 128
    layer = ExpertsShape(4, visited, 64, width, gated=True)
    assert timed == [(layer, (64, 2 * width)), (layer, (width, 64))] * 2
    # q, k, v together and o; of shared experts gate and up together, down, and in one model a gate of their own.
    linear = 2 * {"qwen2_moe": 5, "llama4_text": 4}.get(name, 2)
    assert (once[FROZEN], again[FROZEN]) == (2 * linear + 2 * 2 * 3.0, 3 * linear + 2 * 2 * 4.0)
    # Where nothing is adapted the sorted copies are left, of x and dY, and of x again.
    frozen, twice = (measure_floor(base, recompute=share, **settings | {"rank": 0}) for share in (0.0, 1.0))
    assert twice[ADAPTER] == pytest.approx(1.5 * frozen[ADAPTER])
    copied, bytes_a_token = 2 * 2 * (visited + 1) * 64, 128 * 4
    per_byte = 1.0 / (2 * 2**30 // 64)
    assert frozen[ADAPTER] == pytest.approx(copied * bytes_a_token * per_byte)
    gates_and_sums = 2 * (2 * (visited + 1) * 64 + 8 * visited * width)
    assert once[NORMS] > gates_and_sums * bytes_a_token * per_byte


@pytest.mark.parametrize("visited", [1, 4])
def test_grouped_products_are_timed_on_this_machine(visited: int) -> None:
    layer = ExpertsShape(4, visited, 16, 24, gated=False)
    assert layer.products() == ((16, 24), (24, 16))
    for product in layer.products():
        assert min(_time_grouped(3, layer, product, torch.float32, torch.device("cpu"), 2)) > 0.0
