"""`zerolora estimate`, `auto`, and what is advised when nothing fits."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from launcher.supervision.restarts import AttemptResult, RestartLoop
from tests.tiny import write_chats
from trainer.commands.estimate import build_report, main, parse_memory
from trainer.config import AUTO, LoraSection, ModelSection, RunConfig, UserError, load_config
from trainer.contract.exit_codes import EXIT_RESTART
from trainer.contract.restart_record import RestartNote
from trainer.data.prepared import PreparedRun
from trainer.memory.advice import _combine_changes, describe_memory_shortage, find_smaller_batch, suggest_changes
from trainer.memory.bytes import GIB
from trainer.memory.decisions import Machine
from trainer.memory.model_widths import read_shapes
from trainer.memory.observed import observe_layers
from trainer.memory.oom_recovery import Recovery, StepOutOfMemoryError
from trainer.memory.planner import (
    RECOMPUTATION,
    RECOMPUTED_LAYERS_KEY,
    SPARE_FRACTION,
    Changes,
    DataSize,
    Planner,
    apply_changes,
    format_gib,
)
from trainer.memory.preflight import plan_for_machine
from trainer.memory.stored_weights import ModelShapes
from trainer.model.base import load_model_config
from trainer.setup.preflight import prepare

ROOT = Path(__file__).parent.parent.parent
BF16_GPU = Machine(4, on_gpu=True, precision="bf16", own_kernels=True, flash=True)


@pytest.fixture(scope="module")
def shapes() -> ModelShapes:
    return read_shapes(load_model_config("random:llama3.1-8b", ModelSection()), ModelSection(), LoraSection())


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    file = tmp_path_factory.mktemp("plan") / "run.yaml"
    tree = {
        "base_model": "random:llama3.1-8b",
        "output_dir": "unset",
        "dataset": {"path": "absent.jsonl", "packing": True},
        "training": {"batch_size": 4, "gradient_accumulation_steps": 2},
    }
    file.write_text(yaml.safe_dump(tree))
    return load_config(file).config


@pytest.fixture(scope="module")
def planner(shapes: ModelShapes, config: RunConfig) -> Planner:
    return Planner(shapes, DataSize.assume(config), BF16_GPU)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("80", 80 * GIB), ("24GB", 24 * 10**9), ("40960MiB", 40 * GIB), (" 1.5 GiB ", 3 * GIB // 2)],
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "much", "-80GiB", "0", "0.5GiB", "80 parsecs", "1e3", "9999999999TiB"])
def test_impossible_amounts(text: str) -> None:
    with pytest.raises(UserError, match="--gpu-memory"):
        parse_memory(text)


def test_the_lowest_stage_that_fits(planner: Planner, config: RunConfig) -> None:
    needs = [planner.estimate(apply_changes(config, {"zero.stage": stage})).needed for stage in range(4)]
    assert needs == sorted(needs, reverse=True)
    for stage, need in enumerate(needs):
        assert planner.find_lowest_stage(config, need) == needs.index(need)
        assert planner.find_lowest_stage(config, need - 1) == (None if stage == 3 else stage + 1)


def test_the_largest_batch_is_the_last_that_fits(planner: Planner, config: RunConfig) -> None:
    memory = 80 * GIB
    batch = planner.find_largest_batch(config, memory)
    found = [planner.estimate(apply_changes(config, {"training.batch_size": size})) for size in (batch, batch + 1)]
    sizes = [each.needed + int(each.peak * SPARE_FRACTION) for each in found]
    assert sizes[0] <= memory < sizes[1]
    assert planner.find_largest_batch(config, GIB) == 0


def test_a_configured_batch_that_fits_is_never_called_too_large(planner: Planner, config: RunConfig) -> None:
    memory = planner.estimate(config).needed  # fits without the reserve that is kept for larger batches
    found, _ = build_report(planner, config, memory, [])
    assert planner.find_largest_batch(config, memory) < config.training.batch_size
    assert found["fits"] and found["largest_batch_size"] == config.training.batch_size
    if found["recommended"]["zero.stage"] == config.zero.stage:
        assert found["recommended"]["training.batch_size"] == config.training.batch_size


def test_memory_independent_of_rows_is_counted_once(planner: Planner, config: RunConfig) -> None:
    """A dequantized weight: 8 rows, which are extended from fewer, as if they had been observed."""
    changed = apply_changes(config, {"adapter": "qlora", "training.batch_size": 8})
    work = planner.build_micro_step(changed, planner.build_decisions(changed))
    assert planner._estimate_layers(work.settings, 8)[0].peak == pytest.approx(
        observe_layers(planner.shapes, work.settings, 8)[0].peak, rel=0.001
    )


def test_one_row_may_fill_the_card(planner: Planner, config: RunConfig) -> None:
    memory = planner.estimate(apply_changes(config, {"training.batch_size": 1})).needed
    assert planner.find_largest_batch(config, memory) == 1
    assert planner.find_largest_batch(config, memory - 1) == 0


@pytest.mark.parametrize("packing", [False, True])
def test_models_without_sdpa_keep_probabilities(config: RunConfig, packing: bool) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "head_dim": 16}
    shapes = read_shapes(AutoConfig.for_model("gemma2", **sizes), ModelSection(), LoraSection())
    planner = Planner(shapes, DataSize.assume(config), BF16_GPU)
    changed = {kind: {"model.attn_implementation": kind, "dataset.packing": packing} for kind in ("auto", "eager")}
    auto, eager = (planner.estimate(apply_changes(config, changes)).peak for changes in changed.values())
    assert auto == eager


def test_shared_heads_are_copied_without_flash_attention(planner: Planner, config: RunConfig) -> None:
    old = replace(planner, machine=replace(planner.machine, flash=False))
    for kernels, more in (("auto", True), ("sdpa", True), ("eager", False)):
        changed = apply_changes(config, {"model.attn_implementation": kernels, "dataset.packing": False})
        assert (old.estimate(changed).peak > planner.estimate(changed).peak) == more


def test_ranks_that_share_a_sequence_keep_a_fraction_of_it(planner: Planner, config: RunConfig) -> None:
    alone = apply_changes(config, {"training.batch_size": 1, "zero.stage": 2, "dataset.max_length": 2048})
    shared = apply_changes(alone, {"parallel.sequence": 4})
    one, four = (planner.estimate(each).terms for each in (alone, shared))
    assert four["activations"] == pytest.approx(one["activations"] / 4, rel=0.01)
    assert four["base model"] == one["base model"] and four["optimizer"] == one["optimizer"]
    together = apply_changes(shared, {"training.global_batch_size": 6})
    assert planner.find_largest_useful_batch(together) == 6, "4 ranks read as one"


def test_no_more_rows_than_there_are(shapes: ModelShapes, config: RunConfig) -> None:
    few = Planner(shapes, DataSize(16, 16, samples=24), BF16_GPU)
    assert few.find_largest_batch(config, 80 * GIB) == 3  # 24 samples, 4 GPUs, 2 micro-steps
    assert few.find_largest_useful_batch(config) == 3
    together = apply_changes(config, {"training.global_batch_size": 32, "training.gradient_accumulation_steps": 1})
    assert few.find_largest_useful_batch(together) == 8
    assert few.resolve(apply_changes(together, {"training.batch_size": AUTO}), 80 * GIB).training.batch_size == 8


def test_auto_fills_the_card_at_the_lowest_stage(planner: Planner, config: RunConfig) -> None:
    is_open = apply_changes(config, {"zero.stage": AUTO, "training.batch_size": AUTO})
    for memory, stage in ((80 * GIB, 0), (17 * GIB, 3)):
        resolved = planner.resolve(is_open, memory)
        assert resolved.zero.stage == stage
        assert planner.estimate(resolved).needed <= memory
        assert resolved.training.batch_size == planner.find_largest_batch(resolved, memory) >= 1


def test_auto_recomputes_no_more_than_it_must(planner: Planner, config: RunConfig) -> None:
    is_open = apply_changes(config, {"training.gradient_checkpointing": "auto", "training.batch_size": 8})
    without, every = (
        planner.estimate(apply_changes(is_open, {"training.gradient_checkpointing": way})).needed
        for way in ("none", "non_reentrant")
    )

    def resolved(memory: int | None) -> tuple[str, int | None]:
        training = planner.resolve(is_open, memory).training
        return training.gradient_checkpointing, training.gradient_checkpointing_layers

    assert resolved(without) == resolved(None) == ("none", None)
    # Keeping the recomputed layer costs nothing: all but one need no more than all.
    assert resolved(every) == ("non_reentrant", 31) and resolved(every - 1) == ("non_reentrant", None)
    seen = []
    for part in range(1, 8):
        memory = every + (without - every) * part // 8
        way, layers = resolved(memory)
        assert way == "non_reentrant" and layers is not None
        there, one_less = (
            planner.estimate(apply_changes(is_open, {RECOMPUTATION: way, RECOMPUTED_LAYERS_KEY: count})).needed
            for count in (layers, layers - 1 or None)
        )
        assert there <= memory < one_less or (layers == 1 and there <= memory)
        seen.append(layers)
    assert seen == sorted(seen, reverse=True) and len(set(seen)) == len(seen)


def test_auto_skips_a_stage_that_other_settings_forbid(planner: Planner, config: RunConfig) -> None:
    asked = {"zero.stage": AUTO, "training.optimizer": "adamw_8bit", "training.precision": "bf16"}
    assert planner.resolve(apply_changes(config, asked), 200 * GIB).zero.stage == 1


def test_auto_without_a_gpu(planner: Planner, config: RunConfig) -> None:
    resolved = planner.resolve(apply_changes(config, {"zero.stage": AUTO, "training.batch_size": AUTO}), None)
    assert (resolved.zero.stage, resolved.training.batch_size) == (2, 1)
    assert planner.resolve(config, None) == config
    by_layer = apply_changes(config, {"zero.stage": AUTO, "zero.gather": "layer"})
    assert planner.resolve(by_layer, None).zero.stage == 3  # the only one that gathers


def test_three_changes_that_fit_come_first(planner: Planner, config: RunConfig) -> None:
    memory = 40 * GIB
    assert planner.estimate(config).needed > memory
    advice = suggest_changes(planner, config, memory)
    assert len(advice) == 3 and all(option.needed <= memory for option in advice)
    for option in advice:
        assert planner.estimate(apply_changes(config, option.changes)).needed == option.needed
    line = describe_memory_shortage(planner, config, memory, "has free")
    assert line.startswith("memory: each GPU needs ") and line.count("GiB)") == 3 and "set training.batch_size=" in line


def test_an_out_of_memory_error_without_a_setting_left_to_change_names_another_fix(config: RunConfig) -> None:
    changes = {
        "adapter": "qlora",
        "dataset.max_length": 128,
        "training.batch_size": 1,
        "training.gradient_checkpointing": "non_reentrant",
    }
    recovery = Recovery(apply_changes(config, changes), 1, Planner)

    def run_out_of_memory() -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(StepOutOfMemoryError, match=r"batch_size 1; use a smaller model or a larger GPU$"):
        recovery.attempt(1, 0, run_out_of_memory)


def test_changes_are_combined_if_none_is_enough(planner: Planner, config: RunConfig) -> None:
    memory = 9 * GIB
    advice = suggest_changes(planner, config, memory)
    assert advice[0].needed <= memory and len(advice[0].changes) > 2
    assert advice[1].needed > memory
    line = describe_memory_shortage(planner, config, memory, "has")
    assert f"set {advice[0]}; helpful but not enough: {advice[1]}; {advice[2]}" in line
    assert "no change is enough" in describe_memory_shortage(planner, config, 2 * GIB, "has")


def test_combined_changes_keep_the_highest_stage(planner: Planner, config: RunConfig) -> None:
    whole = apply_changes(config, {"zero.stage": 0})
    parts: list[Changes] = [{"zero.stage": 3}, {"zero.stage": 1, "zero.offload_optimizer": True}]
    together = {"zero.stage": 3, "zero.offload_optimizer": True}
    memory = planner.estimate(apply_changes(whole, together)).needed
    singles = [planner.try_changes(whole, changes) for changes in parts]
    assert [advice.changes for advice in _combine_changes(planner, whole, memory, singles)] == [together]


def test_table_and_advice_agree(planner: Planner, config: RunConfig) -> None:
    """What `zerolora estimate` calls fitting the check before a run does not call impossible."""
    for changes in ({}, {"zero.stage": 3, "zero.gather": "module"}):
        start = apply_changes(config, changes)
        most_offloaded = planner.list_stages(start)[-1].estimate
        assert most_offloaded is not None
        assert "no change is enough" not in describe_memory_shortage(planner, start, most_offloaded.needed, "has")


def test_longer_sequences_and_higher_ranks_need_more(planner: Planner, config: RunConfig) -> None:
    shorter = apply_changes(config, {"dataset.max_length": 512})
    assert planner.estimate(shorter).needed < planner.estimate(config).needed
    offloaded = apply_changes(config, {"zero.offload_optimizer": True})
    assert planner.estimate(offloaded).needed < planner.estimate(config).needed
    assert (
        planner.estimate(offloaded).host > planner.estimate(config).host - planner.estimate(config).terms["base model"]
    )


@pytest.mark.parametrize(
    ("batch", "accumulation", "most", "result"),
    [(4, 1, 2, (2, 2)), (3, 1, 1, (1, 3)), (5, 2, 2, (2, 5)), (6, 1, 3, (3, 2)), (7, 3, 3, (3, 7)), (16, 4, 8, (8, 8))],
)
def test_a_smaller_micro_batch_keeps_the_global_batch(
    batch: int, accumulation: int, most: int, result: tuple[int, int]
) -> None:
    changes = find_smaller_batch(batch, accumulation, most)
    assert (changes["training.batch_size"], changes["training.gradient_accumulation_steps"]) == result
    assert result[0] * result[1] == batch * accumulation


def test_sizes_as_people_read_them() -> None:
    assert [format_gib(size) for size in (GIB // 16, GIB // 2, 3 * GIB, 40 * GIB)] == [
        "64.0 MiB", "0.50 GiB", "3.00 GiB", "40.0 GiB",
    ]  # fmt: skip


def estimate(tmp_path: Path, *arguments: str, **tree: Any) -> tuple[int, str, str]:
    file = tmp_path / "run.yaml"
    base = {"base_model": "random:tinyllama-1.1b", "output_dir": "unset", "dataset": {"path": "absent.jsonl"}}
    file.write_text(yaml.safe_dump(base | tree))
    command = [sys.executable, "-m", "launcher.cli", "estimate", str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_command_says_everything_as_json(tmp_path: Path) -> None:
    code, out, err = estimate(tmp_path, "--gpus", "2", "--gpu-memory", "24GiB", "--json", "zero.stage=auto")
    assert code == 0, err
    found = json.loads(out)
    assert found["gpus"] == 2 and found["gpu_memory_bytes"] == 24 * GIB and found["fits"]
    assert found["stage"] == found["recommended"]["zero.stage"] == 0
    assert found["recommended"]["training.batch_size"] == found["largest_batch_size"] > 1
    assert {(row["stage"], row["offload_optimizer"], row["offload_parameters"]) for row in found["stages"]} == {
        (0, False, False), (1, False, False), (1, True, False), (2, False, False), (2, True, False),
        (3, False, False), (3, True, False), (3, True, True),
    }  # fmt: skip
    assert all(row["peak_bytes"] > GIB and row["disk_bytes"] > 0 for row in found["stages"])
    assert any("2,048 tokens" in note for note in found["notes"])  # there is no data to look at
    assert found["decisions"]["fused_head"]["value"] is True


def test_nothing_fits_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    code, out, err = estimate(tmp_path, "--gpu-memory", "1GiB")
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 2 and len(lines) == 1 and "use a smaller model or a larger GPU" in lines[0]
    assert "too large" in out


def test_misfits_and_impossible_stages_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """7.7 GiB including 2.1 GiB of the base, which can be offloaded to host memory."""
    file = tmp_path / "run.yaml"
    file.write_text("base_model: random:tinyllama-1.1b\noutput_dir: x\ndataset: {path: absent.jsonl}\n")
    assert main([str(file), "lora_r=16", "training.batch_size=2", "--gpu-memory", "6GiB"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("lora_r is read as lora.r\n")
    assert "too large as configured; the lowest stage that fits" in out
    assert "zero.stage=3 zero.offload_optimizer=true zero.offload_parameters=true" in out
    assert "on 1 GPU of 6.00 GiB: " in out
    assert main([str(file), "training.optimizer=adamw_8bit"]) == 0
    out = capsys.readouterr().out
    assert out.count("not possible: ") == 1 and "turn zero.offload_optimizer off" in out


def test_several_adapters_are_estimated_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one adapter with the sum of their ranks, and a batch of the rows of all."""
    file = tmp_path / "run.yaml"
    file.write_text("base_model: random:tinyllama-1.1b\noutput_dir: x\ndataset: {path: absent.jsonl}\n")
    several = "adapters=[{name: a, lora.r: 8, training.batch_size: 1}, {name: b, lora.r: 24, training.batch_size: 3}]"
    assert main([str(file), several, "lora.alpha=16"]) == 0
    together = capsys.readouterr().out
    assert "2 adapters" in together
    rows = [line for line in together.splitlines() if "stage" in line and "GiB" in line]
    assert main([str(file), "lora.r=32", "training.batch_size=4", "training.cuda_graphs=off"]) == 0
    assert rows == [line for line in capsys.readouterr().out.splitlines() if "stage" in line and "GiB" in line] != []


@pytest.mark.parametrize("arguments", [["--gpu-memory", "none"], ["--gpus-per-host", "0"], ["zero.stag=2"]])
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("base_model: random:tiny\noutput_dir: x\ndataset: {path: absent.jsonl}\n")
    assert main([str(file), *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_every_preset_has_an_estimate() -> None:
    """The hub is not asked: published shapes stand in for names that cannot be read."""
    for file in sorted((ROOT / "configs").glob("*b.yaml")):
        from trainer.setup.text_run import read_model_config

        model_config, _ = read_model_config(load_config(file).config)
        assert model_config.num_hidden_layers > 1


def test_the_launcher_starts_again_at_most_three_times(tmp_path: Path) -> None:
    started: list[list[str]] = []

    def start(more: Any) -> AttemptResult:
        started.append(list(more))
        RestartNote(7, 8 >> len(started), 2 ** len(started), 3).write(tmp_path / "logs")
        return AttemptResult(EXIT_RESTART)

    assert RestartLoop(tmp_path, start, max_restarts=0, resumes=True).run() == 1
    assert [len(more) for more in started] == [0, 5, 5, 5]
    assert started[2][:2] == ["training.batch_size=2", "training.gradient_accumulation_steps=4"]
    assert RestartNote.take(tmp_path / "logs") is None


def test_the_launcher_takes_an_exit_code_as_it_comes(tmp_path: Path) -> None:
    RestartNote(1, 1, 1, 2).write(tmp_path / "logs")  # of a run without a launcher
    endings = iter([AttemptResult(0), AttemptResult(1), AttemptResult(EXIT_RESTART)])
    starts = [RestartLoop(tmp_path, lambda _: next(endings), max_restarts=3, resumes=False) for _ in range(3)]
    assert [start.run() for start in starts] == [0, 1, 1]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, PreparedRun]:
    """20 chats for a model of a published shape, without weights."""
    folder = tmp_path_factory.mktemp("prepared")
    tree = {
        "base_model": "random:tinyllama-1.1b",
        "output_dir": str(folder / "run"),
        "dataset": {"path": str(write_chats(folder / "chats.jsonl", 20)), "cache_dir": str(folder / "cache")},
        "training": {"batch_size": 4, "precision": "bf16"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(folder / "run.yaml").config
    return config, prepare(config)


def test_lengths_are_those_of_the_data(prepared: tuple[RunConfig, PreparedRun]) -> None:
    config, found = prepared
    lengths = DataSize.from_samples(config, found.data.train)
    samples = [found.data.train[index] for index in range(20)]
    assert lengths.longest == max(len(sample.input_ids) for sample in samples) < config.dataset.max_length
    assert lengths.targets == max(sum(sample.loss_weights[1:]) for sample in samples) > 0
    assert lengths.samples == 20


def test_a_card_with_too_little_memory_is_refused_before_weights_are_loaded(
    prepared: tuple[RunConfig, PreparedRun],
) -> None:
    config, found = prepared
    with pytest.raises(UserError) as refusal:
        plan_for_machine(Planner, BF16_GPU, config, found, 3 * GIB)
    line = str(refusal.value)
    assert "but can use 3.00 GiB; set " in line and line.count("GiB)") == 3
    assert line.endswith("to train anyway, set training.ignore_memory_check=true")
    ignored = plan_for_machine(
        Planner, BF16_GPU, apply_changes(config, {"training.ignore_memory_check": True}), found, 3 * GIB
    )
    assert ignored.estimate is not None and "warning" in ignored.notes[0]
    assert plan_for_machine(Planner, BF16_GPU, config, found, 80 * GIB).notes == ()


def test_auto_is_resolved_before_the_run(prepared: tuple[RunConfig, PreparedRun]) -> None:
    config, found = prepared
    plan = plan_for_machine(
        Planner, BF16_GPU, apply_changes(config, {"zero.stage": AUTO, "training.batch_size": AUTO}), found, 80 * GIB
    )
    assert (plan.config.zero.stage, plan.config.training.batch_size) == (0, 5)  # 20 chats on 4 GPUs
    assert plan.notes[0].startswith("auto: ZeRO stage 0, batch_size 5, ")
    plan = plan_for_machine(Planner, BF16_GPU, apply_changes(config, {"zero.stage": AUTO}), found, None)
    assert plan.notes == ("auto: ZeRO stage 2, batch_size 4, the defaults without a GPU",)


def test_a_model_that_the_estimate_cannot_read_still_trains(prepared: tuple[RunConfig, PreparedRun]) -> None:
    config, found = prepared
    unknown = replace(found, model_config=object())
    assert plan_for_machine(Planner, BF16_GPU, config, unknown, 80 * GIB).estimate is None
    for memory in (80 * GIB, None):
        with pytest.raises(UserError, match=r"memory cannot be estimated .* set both to numbers"):
            plan_for_machine(Planner, BF16_GPU, apply_changes(config, {"zero.stage": AUTO}), unknown, memory)
