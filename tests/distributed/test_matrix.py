"""What must be true of training on several ranks: the losses agree, resumed runs continue, adapters are whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.conftest import Matrix
from tests.distributed.plan import PAIRS, RESUMES, STAGES, VARIANTS

# More than a hundred runs in one set of ranks, before the first test.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]

LEARNED = 3e-3
"""Nats in four steps: the least of all variants, two targets of seven, is 4.4e-3; NF4's own offset is 1.6e-3."""


@pytest.mark.parametrize("name", PAIRS)
def test_losses_do_not_depend_on_stage_ranks_checkpointing_or_operators(matrix: Matrix, name: str) -> None:
    adapter, _, _, backend = PAIRS[name]
    one_rank = matrix["one-4x2" if adapter == "lora" else "one-qlora"].losses
    assert len(one_rank) == 4
    assert one_rank[-1] < matrix["untrained"].losses[-1] - LEARNED
    assert matrix[name].losses == pytest.approx(one_rank, abs=1e-5)
    # Of two layers: q, k, v and gate, up.
    fused = "fused 14 of 14 adapted layers (reference: requested), 10 of them grouped"
    assert (fused in matrix[name].console) == (backend == "reference")


def test_losses_and_gradients_do_not_depend_on_how_the_batch_is_cut(matrix: Matrix) -> None:
    """(1 rank, 4 micro-steps), (2 ranks, 2) and (1 rank, 1), on ragged lengths."""
    cut_up, whole, two_ranks = matrix["one-4x2"], matrix["one-1x8"], matrix["lora-0-none"]
    for other in (whole, two_ranks):
        assert other.losses == pytest.approx(cut_up.losses, abs=1e-5)
        assert other.records("train/grad_norm") == pytest.approx(cut_up.records("train/grad_norm"), rel=1e-4)
        for name, value in cut_up.adapter().items():
            # In 32 bits: gradients are added up in other orders, and AdamW divides by their size.
            torch.testing.assert_close(other.adapter()[name], value, atol=3e-7, rtol=1e-6)


def test_full_fine_tuning_learns_more_than_an_adapter(matrix: Matrix) -> None:
    assert matrix["full-0"].losses[0] == pytest.approx(matrix["lora-0-none"].losses[0], abs=1e-5)
    assert matrix["full-0"].losses[-1] < matrix["lora-0-none"].losses[-1] - 0.1  # measured 0.16


@pytest.mark.parametrize("stage", STAGES[1:])
def test_full_fine_tuning_agrees(matrix: Matrix, stage: int) -> None:
    assert matrix[f"full-{stage}"].losses == pytest.approx(matrix["full-0"].losses, abs=1e-5)
    weights = load_file(matrix[f"full-{stage}"].folder / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (384, 64)


def test_one_buffer_for_the_adapter_changes_nothing(matrix: Matrix) -> None:
    assert matrix["separate-tensors"].losses == pytest.approx(matrix["lora-2-none"].losses, abs=1e-6)


def test_a_model_is_trained_in_training_mode_also_if_it_is_never_evaluated(matrix: Matrix) -> None:
    """Recomputation draws the same dropout again."""
    assert matrix["never-evaluated"].losses == pytest.approx(matrix["dropout"].losses, abs=1e-5)
    assert matrix["never-evaluated"].losses[1:] != pytest.approx(matrix["lora-2-none"].losses[1:], abs=1e-5)


def test_packing_agrees_over_stages(matrix: Matrix) -> None:
    assert matrix["packed-3"].losses == pytest.approx(matrix["packed-2"].losses, abs=1e-5)
    for stage in (2, 3):
        assert matrix[f"tiled-{stage}"].losses == pytest.approx(matrix["packed-2"].losses, abs=1e-5)


@pytest.mark.parametrize("name", RESUMES)
def test_a_resumed_run_continues_to_the_bit(matrix: Matrix, name: str) -> None:
    whole, again = matrix[f"whole-{name}"], matrix[f"again-{name}"]
    assert len(whole.losses) == 6
    assert again.losses == whole.losses[3:]
    for key, value in whole.adapter().items():
        assert torch.equal(again.adapter()[key], value), key
    assert "resumed from" in again.console


@pytest.mark.parametrize("name", ["cut-to-stage3", "cut-to-one-rank"])
def test_a_run_resumes_elsewhere(matrix: Matrix, name: str) -> None:
    """From ZeRO-2 to ZeRO-3, and from two ranks to one."""
    assert matrix[name].losses == pytest.approx(matrix["cut"].losses[3:], abs=1e-5)


def test_8_bit_moments_resume_elsewhere(matrix: Matrix) -> None:
    """From ZeRO-2 on two ranks to ZeRO-0 on one, where they are rounded again."""
    again, whole = matrix["cut-adam8-to-one-rank"], matrix["cut-adam8"]
    assert again.losses == pytest.approx(whole.losses[3:], abs=1e-4)
    assert "requantized" in again.console
    for name, value in whole.adapter().items():
        torch.testing.assert_close(again.adapter()[name], value, atol=1e-3, rtol=0)


def test_a_finished_run_continues_to_more_steps(matrix: Matrix) -> None:
    assert len(matrix["longer"].losses) == 2
    state = json.loads((matrix["longer"].folder / "checkpoint-8" / "state.json").read_text())
    assert state["step"] == 8


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_adapter_learns_and_is_saved(matrix: Matrix, name: str, stage: int) -> None:
    case = matrix[f"{name}-{stage}"]
    untrained = matrix["untrained-biased" if name == "biased" else "untrained"].losses
    assert case.losses[-1] < untrained[-1] - LEARNED
    adapter = case.adapter()
    assert all(value.numel() for value in adapter.values())
    assert all(bool(value.any()) for key, value in adapter.items() if "lora_B" in key)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_adapter_agrees_over_stages(matrix: Matrix, name: str) -> None:
    assert matrix[f"{name}-3"].losses == pytest.approx(matrix[f"{name}-2"].losses, abs=1e-5)


def test_an_8_bit_base_gives_the_same_losses_at_every_stage(matrix: Matrix) -> None:
    for stage in (0, 1, 3):
        assert matrix[f"fp8-{stage}"].losses == pytest.approx(matrix["fp8-2"].losses, abs=1e-5)
    assert matrix["fp8-peft"].losses == pytest.approx(matrix["fp8-2"].losses, abs=5e-4)  # measured 9e-5
    plain = matrix["lora-2-none"].losses
    assert matrix["fp8-2"].losses == pytest.approx(plain, abs=5e-3)  # measured 1.4e-3
    assert matrix["int8-2"].losses == pytest.approx(plain, abs=1.5e-3)  # measured 4e-4


@pytest.mark.parametrize(("kind", "stages"), [("int8", (3,)), ("int4", (0, 1, 3))])
def test_rounded_weights_give_the_same_losses_at_every_stage(
    matrix: Matrix, kind: str, stages: tuple[int, ...]
) -> None:
    rounded, plain = matrix[f"rounded-{kind}-2"].losses, matrix["lora-2-none"].losses
    assert rounded[-1] < matrix["untrained"].losses[-1] - LEARNED
    for stage in stages:
        assert matrix[f"rounded-{kind}-{stage}"].losses == pytest.approx(rounded, abs=1e-5)
    assert rounded == pytest.approx(plain, abs={"int8": 2e-3, "int4": 2e-2}[kind])
    assert rounded != pytest.approx(plain, abs=1e-5)


def test_rounded_weights_do_not_care_who_gathers_recomputes_or_packs(matrix: Matrix) -> None:
    for name in ("module", "recomputed"):
        assert matrix[f"rounded-{name}"].losses == pytest.approx(matrix["rounded-int4-2"].losses, abs=1e-5), name
    assert matrix["rounded-packed-3"].losses == pytest.approx(matrix["rounded-packed-2"].losses, abs=1e-5)
    # Recomputation draws the same dropout again.
    assert matrix["rounded-dropout-again"].losses == pytest.approx(matrix["rounded-dropout"].losses, abs=1e-5)
    assert matrix["rounded-dropout"].losses[1:] != pytest.approx(matrix["rounded-int4-2"].losses[1:], abs=1e-5)


def test_modules_to_save_are_in_the_adapter(matrix: Matrix) -> None:
    assert matrix["modules_to_save-3"].adapter()["base_model.model.lm_head.weight"].shape == (384, 64)


def test_dora_magnitudes_are_in_the_adapter(matrix: Matrix) -> None:
    assert any("magnitude" in name for name in matrix["dora-3"].adapter())


def test_pissa_is_saved_for_the_unchanged_base(matrix: Matrix) -> None:
    """The base gives the logits of the trained model, although PiSSA took the adapter's start out of its weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    case = matrix["pissa-2"]
    assert json.loads((case.folder / "adapter_config.json").read_text())["r"] == 8
    base = AutoModelForCausalLM.from_pretrained(case.folder.parent / "model")
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        plain = base(ids).logits
        start = PeftModel.from_pretrained(base, str(case.folder / "initial_adapter"))
        moved = start(ids).logits
        start.unload()
        trained = PeftModel.from_pretrained(base, str(case.folder))(ids).logits
    # Small steps from a start that equals the base: near it, while the adapter's own start alone is far away.
    assert (trained - plain).abs().max() < 0.2 * (moved - plain).abs().max()
    assert (trained - plain).abs().max() > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_offloading_changes_nothing(matrix: Matrix, stage: int) -> None:
    assert matrix[f"offload-{stage}"].losses == pytest.approx(matrix["lora-2-none"].losses, abs=1e-5)


def test_a_checkpoint_holds_no_frozen_weights(matrix: Matrix) -> None:
    """Master weights and two moments in fp32, the adapter, and small change; far less than the base model."""
    folder = matrix["whole-lora-stage3-bf16"].folder
    trained = sum(value.numel() for value in load_file(folder / "adapter_model.safetensors").values())
    stored = {path.name: path.stat().st_size for path in (folder / "checkpoint-3").iterdir()}
    parts = [size for name, size in stored.items() if name.startswith("training_state-")]
    assert len(parts) == 2 and sum(parts) < 12 * trained + 64_000
    assert stored["adapter_model.safetensors"] < 4 * trained + 16_000
    assert (folder / "checkpoint-3" / "COMPLETE").exists()
    assert not list(folder.glob(".writing-*"))


def test_the_adapter_loads_in_peft_with_the_logits_it_was_trained_to(matrix: Matrix) -> None:
    """PeftModel.from_pretrained reproduces the held-out loss that the run measured at its end."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainer.config import SourceSection
    from trainer.config.data_sections import DatasetSection
    from trainer.data.batches import iterate_evaluation_batches
    from trainer.data.cache import prepare_data

    case = matrix["lora-3-non_reentrant"]
    root: Path = case.folder.parent
    tokenizer = AutoTokenizer.from_pretrained(case.folder)
    base = AutoModelForCausalLM.from_pretrained(root / "model")
    model = PeftModel.from_pretrained(base, str(case.folder)).eval()
    section = DatasetSection(
        path=str(root / "train.jsonl"), evaluation=SourceSection(path=str(root / "held_out.jsonl")), max_length=96
    )
    data = prepare_data(section, tokenizer, seed=42, cache_dir=root / "cache", model_max_length=256)
    assert data.evaluation is not None
    loss_sum, targets = 0.0, 0
    for batch in iterate_evaluation_batches(
        data.evaluation, batch_size=2, rank=0, world_size=1, pad_token_id=0, flat=False
    ):
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        wanted = batch.targets
        loss_sum += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
        targets += int((wanted != -100).sum())
    assert loss_sum / targets == pytest.approx(case.records("eval/loss")[-1], abs=1e-5)


def test_training_ends_when_the_held_out_loss_no_longer_falls(matrix: Matrix) -> None:
    held_out = matrix["early"].records("eval/loss")
    assert len(matrix["early"].losses) < 8
    assert min(held_out[1:]) == held_out[-3]  # two evaluations in a row without a lower one
    case, steps = matrix["early"], len(matrix["early"].losses)
    console = (case.folder.parent / "early-console-0.txt").read_text()
    assert f"stopped early at step {steps} of 8" in console and "training.early_stopping=2" in console
    assert f"{steps} of 8, stopped early" in (case.folder / "report.html").read_text()


def test_the_best_checkpoint_is_the_result(matrix: Matrix) -> None:
    case = matrix["best"]
    held_out = case.records("eval/loss")[1:6]
    best = held_out.index(min(held_out)) + 1
    assert best < 5, "the case must get worse at its end"
    expected = load_file(case.folder / f"checkpoint-{best}" / "adapter_model.safetensors")
    for name, value in expected.items():
        assert torch.equal(case.adapter()[name], value)
    kept = {path.name for path in case.folder.glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best}", "checkpoint-5"}  # save_total_limit=1, and the best
    assert (case.records("eval/kept_step"), case.records("eval/kept_loss")) == ([best], [min(held_out)])
    page, card = (case.folder / "report.html").read_text(), (case.folder / "README.md").read_text()
    console = (case.folder.parent / "best-console-0.txt").read_text()
    before = case.records("eval/loss")[0]
    assert f"{before:.4f} -> {min(held_out):.4f}" in console and f"{before:.4f} → {min(held_out):.4f}" in card
    assert f"after {min(held_out):.4f} (step {best})" in page and f"after {min(held_out):.4f} (step {best})" in card
    assert f"{before:.3f} → {min(held_out):.3f}" in page and f"kept: step {best}" in page


def test_a_stream_trains_as_the_same_data_in_memory(matrix: Matrix) -> None:
    assert matrix["streamed"].losses == pytest.approx(matrix["in-order"].losses, abs=1e-6)


def test_added_tokens_are_trained_and_saved(matrix: Matrix) -> None:
    case = matrix["added-tokens"]
    assert any("token_adapter" in name or "trainable_tokens" in name for name in case.adapter())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case.folder)
    assert len(tokenizer("<note>", add_special_tokens=False)["input_ids"]) == 1


def test_the_last_batch_of_an_epoch_may_be_short(matrix: Matrix) -> None:
    """40 documents in global batches of 6 are 7 steps an epoch, the last of 4 documents."""
    case = matrix["two-epochs"]
    assert len(case.losses) == 14
    assert case.records("train/epoch")[6] == 1.0
    assert case.records("train/epoch")[-1] == 2.0
    tokens = case.records("train/target_tokens")
    assert tokens[13] == 2 * tokens[6]


def test_a_grown_vocabulary_is_trained_and_saved(matrix: Matrix) -> None:
    """80 tokens more than the model has rows for: the embedding grows, and the adapter brings the 80 rows along."""
    rows = [value for name, value in matrix["grown-vocabulary"].adapter().items() if "embed_tokens" in name]
    assert [row.shape for row in rows] == [(80, 64)]


def test_clipping_changes_the_steps_but_not_the_reported_norm(matrix: Matrix) -> None:
    clipped, free = matrix["clipped-2"], matrix["lora-2-none"]
    assert clipped.records("train/grad_norm")[0] == pytest.approx(free.records("train/grad_norm")[0], rel=1e-5)
    assert clipped.records("train/grad_norm")[0] > 0.05
    # AdamW undoes the scale of a gradient but for its epsilon: the losses stay near, and are not the same.
    assert clipped.losses[-1] != free.losses[-1]
    assert clipped.losses == pytest.approx(free.losses, abs=1e-3)
    assert clipped.losses == pytest.approx(matrix["clipped-0"].losses, abs=1e-5)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_that_is_not_finite_stops_the_run(matrix: Matrix, stage: int) -> None:
    """The step that would have destroyed the weights is named and was not applied."""
    folder = matrix["lora-2-none"].folder.parent
    assert "the loss or a gradient is not finite" in (folder / f"nonfinite-stop-{stage}-diverged-0.txt").read_text()
    records = (folder / f"nonfinite-stop-{stage}" / "metrics.jsonl").read_text()
    assert '"step": 1' in records and '"step": 8' not in records
    assert not (folder / f"nonfinite-stop-{stage}" / "adapter_model.safetensors").exists()


def test_steps_that_are_not_finite_are_skipped_ten_times_at_most(matrix: Matrix) -> None:
    folder = matrix["lora-2-none"].folder.parent
    assert "not finite" in (folder / "nonfinite-skip-2-diverged-0.txt").read_text()
    lines = [json.loads(line) for line in (folder / "nonfinite-skip-2" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    finite = [line for line in steps if line["train/loss"] is not None]
    assert len(steps) - len(finite) == 10
    skipped = steps[len(finite) :]
    assert len({line["train/learning_rate"] for line in skipped}) == 1  # the schedule waits too
    assert skipped[-1]["train/nonfinite_steps"] - skipped[0]["train/nonfinite_steps"] == 9


def test_sample_prompts_are_answered_alike_at_every_stage(matrix: Matrix) -> None:
    """Before training, greedily: partitioned weights give the answer that whole ones give."""

    def answers(name: str) -> list[str]:
        text = matrix[name].console
        assert text.count("before training") == text.count("after training") > 0
        return [line for line in text.splitlines() if line.startswith("  -> ")]

    assert answers("answers-3") == answers("answers-2")
    assert len(answers("answers-qlora-3")) >= 2
