"""The predicted time of a step: what was measured on 1, 2 and 4 GPUs, and what must hold of thousands."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_model, write_chats
from trainer.commands.estimate import main
from trainer.config import RunConfig, load_config
from trainer.memory.decisions import Machine
from trainer.memory.model_widths import read_shapes
from trainer.memory.planner import DataSize, Planner
from trainer.memory.step_time import StepTime, count_attention_flops, count_flops, find_peak_flops, predict_step
from trainer.memory.stored_weights import ModelShapes
from trainer.model.base import load_model_config

ROOT = Path(__file__).parent.parent.parent
LLAMA = "random:llama3.1-8b"
LLAMA_70B = f"{LLAMA},hidden_size=8192,intermediate_size=28672,num_hidden_layers=80,num_attention_heads=64"
NF4, FP8 = {"adapter": "qlora"}, {"adapter": "qlora", "quantization.quant_type": "fp8"}
RECOMPUTED = {"training.gradient_checkpointing": "non_reentrant", "training.offload_activations": True}
CASES: dict[str, dict[str, Any]] = {"bf16": {}, "nf4": NF4, "fp8": FP8, "nf4-recompute-offload": {**NF4, **RECOMPUTED}}
RECORDS = json.loads((ROOT / "docs/lab/data/step_times.json").read_text())


def configuration(shape: str, case: str, stage: int, **settings: Any) -> RunConfig:
    given = {
        "base_model": shape, "zero.stage": stage, "dataset.max_length": 2048, "training.batch_size": 4,
        "training.precision": "bf16", "lora.r": 16, **CASES[case], **settings,
    }  # fmt: skip
    path = ROOT / "configs" / "smollm2-135m.yaml"
    return load_config(path, [f"{name}={json.dumps(value)}" for name, value in given.items()]).config


@cache
def shapes_of(shape: str) -> ModelShapes:
    config = configuration(shape, "bf16", 2)
    return read_shapes(load_model_config(shape, config.model), config.model, config.lora)


@cache
def planner(shape: str, gpus: int, per_host: int | None = None) -> Planner:
    return Planner(shapes_of(shape), DataSize(2048, 2048), Machine.assume_gpus(gpus, "bf16", per_host))


def predicted(shape: str, case: str, gpus: int, stage: int, card: str) -> StepTime:
    step, note = predict_step(planner(shape, gpus), configuration(shape, case, stage), card, float("inf"))
    assert not note
    return step


def recorded() -> list[tuple[str, str, int, int, float]]:
    """Every measurement of docs/lab/data/four_h100.json: shape, case, GPUs, stage, milliseconds."""
    found = []
    for name, call in json.loads((ROOT / "docs/lab/data/four_h100.json").read_text()).items():
        command, gpus = call["header"]["command"], int(call["header"]["card"].partition(" ")[0])
        shape = LLAMA_70B if name.startswith("70b") else call["header"]["shape"]
        stage = 3 if "zero.stage=3" in command else 2
        found += [(shape, result["case"], gpus, stage, result["median_ms"]) for result in call["results"]]
    return found


@pytest.mark.parametrize(("shape", "case", "gpus", "stage", "milliseconds"), recorded())
def test_the_records_are_predicted_within_5_percent(
    shape: str, case: str, gpus: int, stage: int, milliseconds: float
) -> None:
    assert 1e3 * predicted(shape, case, gpus, stage, "H100").total == pytest.approx(milliseconds, rel=0.05)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: "-".join(map(str, [*record.values()][:8])))
def test_other_measurements_are_predicted_within_5_percent(record: dict[str, Any]) -> None:
    settings = {
        "training.batch_size": record["rows"], "dataset.max_length": record["length"], "dataset.packing": True,
        "parallel.sequence": record["sequence"],
    }  # fmt: skip
    config = configuration(record["shape"], record["case"], record["stage"], **settings)
    of_length = replace(planner(record["shape"], record["gpus"]), lengths=DataSize(record["length"], record["length"]))
    step, note = predict_step(of_length, config, record["card"], float("inf"))
    assert not note
    assert step.tokens / step.total == pytest.approx(record["tokens_per_s_per_gpu"], rel=0.05)


def test_flops_are_those_of_the_recorded_mfu() -> None:
    found = json.loads((ROOT / "docs/lab/data/four_h100.json").read_text())
    for name, shape in {"8b-1": LLAMA, "30b-nf4-1": "random:qwen3-30b-a3b"}.items():
        result = found[name]["results"][0]
        shapes = planner(shape, 1).shapes
        flops = count_flops(shapes, 4, 2048, 2048) + 3 * count_attention_flops(shapes, 4, 2048)
        mfu = flops / (result["median_ms"] / 1e3) / find_peak_flops("H100")
        assert mfu == pytest.approx(result["mfu"], rel=2e-3)


def test_a_base_within_hosts_does_not_wait_for_the_network() -> None:
    """The 8B shape in bf16 on 128 hosts of 8: 32 GB a step at 50 GB/s last longer than the computation."""
    of_hosts = planner(LLAMA, 1024, 8)
    times: dict[tuple[str, float], StepTime] = {}
    for within in ("host", "all"):
        sharded = configuration(LLAMA, "bf16", 3, **{"zero.shard_within": within})
        times |= {(within, speed): predict_step(of_hosts, sharded, "H100", speed)[0] for speed in (50e9, 400e9)}
    assert times["all", 50e9].total == pytest.approx(32e9 / 50e9, rel=0.1)
    assert times["host", 50e9].gathers == times["host", 400e9].gathers < times["all", 50e9].gathers / 2
    assert times["host", 50e9].gradients > times["host", 400e9].gradients
    totals = [
        predict_step(planner(LLAMA, gpus, 8), configuration(LLAMA, "bf16", 2), "H100", 50e9)[0].total
        for gpus in (64, 512, 4096)
    ]
    assert totals == sorted(totals) and totals[-1] < 1.05 * totals[0]


GIANT = "random:qwen3-30b-a3b,hidden_size=7168,num_hidden_layers=61,num_experts=384,moe_intermediate_size=2048"


@pytest.mark.parametrize("shape", [LLAMA, "random:llama3.1-405b", GIANT])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_is_predicted_from_8b_to_1t_on_64_to_4096_gpus(shape: str, stage: int) -> None:
    settings = {"training.batch_size": 1} | ({"zero.shard_within": "host"} if stage == 3 else {})
    config = configuration(shape, "nf4", stage, **settings)
    steps = [predict_step(planner(shape, gpus, 8), config, "H100", 50e9)[0] for gpus in (64, 512, 4096)]
    assert all(step.compute == steps[0].compute > 0 for step in steps)
    slower = [step.gradients + step.slowest for step in steps]
    assert slower == sorted(slower) and steps[-1].total < 1.2 * steps[0].total
    names = [each.name for each in steps[0].collectives]
    assert names == [*["per-layer all-gather within the host"] * (stage == 3), "adapter gradient reduction"]


def test_collectives_add_up_to_the_bytes_and_seconds_of_a_step() -> None:
    of_hosts = planner(LLAMA, 1024, 8)
    for within, place in {"host": "within the host", "all": "from this and other hosts"}.items():
        config = configuration(LLAMA, "bf16", 3, **{"zero.shard_within": within})
        step, _ = predict_step(of_hosts, config, "H100", 50e9)
        gather, gradients = step.collectives
        traffic = of_hosts.estimate_received_bytes(config)
        assert gather.name == f"per-layer all-gather {place}" and gather.per_step == 64
        weights = traffic["weights_from_its_host"] + traffic["weights_from_other_hosts"]
        assert gather.per_step * gather.bytes_received == pytest.approx(weights, abs=64)
        assert gradients.bytes_received == traffic["gradients"] and gradients.seconds == step.gradients
        assert 0 < step.gathers < gather.per_step * gather.seconds


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    write_chats(tmp_path / "train.jsonl", 40)
    values = {
        "base_model": str(tmp_path / "model"), "output_dir": str(tmp_path / "out"),
        "dataset": {"path": str(tmp_path / "train.jsonl"), "max_length": 64, "cache_dir": str(tmp_path / "cache")},
        "training": {"batch_size": 1, "max_steps": 3600},
    }  # fmt: skip
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(values))
    return path


def test_the_command_prints_speed_hours_and_cost(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(config), "--gpus", "16", "--network", "400Gbit/s", "--price", "2.5"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["speed"]
    assert found["hours"] == pytest.approx(found["step_s"]) and not found["note"]
    assert found["cost"] == pytest.approx(found["hours"] * 16 * 2.5)
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"])
    assert main([*given, "--card", "A100"]) == 0
    shown = capsys.readouterr().out
    assert "predicted on 16 x A100: " in shown and "note: no measurements for A100" in shown and "cost " in shown
    assert main([str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speed"] is None


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--network", "50"], "--network 50: not a bandwidth; write 50GB/s or 400Gbit/s"),
        (["--network", "400Gb/s"], "--network 400Gb/s: not a bandwidth; write 50GB/s or 400Gbit/s"),
        (["--network", "fast"], "--network fast: not a bandwidth; write 50GB/s or 400Gbit/s"),
        (["--price", "-1"], "--price -1: must be above 0"),
        (["--card", "K80"], "--card K80: unknown; use one of"),
        (["--card", "H100", "--gpus-per-host", "2"], "--network: missing"),
        (["--card", "H100", "task=reward"], "speed cannot be predicted"),
        (["--card", "H100", "zero.offload_optimizer=true"], "or offloading are not predicted"),
    ],
)
def test_unpredictable_configurations_are_one_error_line(
    config: Path, given: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config), "--gpus", "4", *given]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
