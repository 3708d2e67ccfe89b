"""`zerolora import` of files with mistakes: one line for each, with their name and line, and nothing is lost."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from launcher.commands import main as zerolora
from launcher.importing import axolotl, llamafactory, trl
from launcher.importing.command import format_yaml, read_foreign_config, translate_arguments
from launcher.importing.translation import Table
from tests.tiny import make_tokenizer
from trainer.config import RunConfig, UserError, load_config
from trainer.config.messages import list_setting_names

AXOLOTL = """\
base_model: org/small
datasets: [{path: org/tales, type: chat_template}]
adapter: lora
micro_batch_size: 1
sequence_len: 64
learning_rate: 1e-4
"""
FACTORY = """\
model_name_or_path: org/small
stage: sft
finetuning_type: lora
template: chatml
cutoff_len: 64
dataset: talks
"""
TALKS = {
    "file_name": "talks.json",
    "formatting": "sharegpt",
    "columns": {"messages": "conversations", "system": "character"},
}
TRL = "sft.py --model_name_or_path org/small --dataset_name org/tales --use_peft".split()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps({"talks": TALKS}))
    return tmp_path


def imported(text: str) -> tuple[RunConfig, str]:
    Path("x.yml").write_text(text)
    return written(["x.yml"])


def written(words: list[str]) -> tuple[RunConfig, str]:
    text = format_yaml(translate_arguments(words), "mine.yaml")
    Path("mine.yaml").write_text(text)
    return load_config("mine.yaml").config, " ".join(text.replace("#", " ").split())


def mistakes(text: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        imported(text)
    return str(caught.value).split("\nerror: ")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["zerolora", "import", *words])
    return zerolora()


WRONG = [
    ("warmup_steps: many", "warmup_steps=many: must be a whole number"),
    ("val_set_size: [1]", "val_set_size=[1]: must be a number"),
    ("peft: [x]", "peft=[x]: must be a mapping"),
    ("deepspeed: {zero_optimization: 3}", "deepspeed.zero_optimization=3: must be a mapping"),
    ("deepspeed: {zero_optimization: {stage: high}}", "deepspeed.zero_optimization.stage=high: must be a whole number"),
    ("lora_r: eight", "lora_r=eight: must be a whole number"),
    ("lora_r: true", "lora_r=true: must be a whole number"),
    ("chat_template: [chatml]", "chat_template=[chatml]: must be a string"),
    ("datasets: [1, null]", "datasets.0=1: must be a mapping"),
    ("datasets: [{path: 5, type: alpaca}]", "datasets.0.path=5: must be a string"),
    ("datasets: [{path: a, type: alpaca, roles: [x]}]", "datasets.0.roles=[x]: must be a mapping"),
    ("datasets: [{path: a, type: alpaca}, {type: alpaca}]", "datasets.1.path: missing; set it to a file"),
    ("special_tokens: {pad_token: [p]}", "special_tokens.pad_token=[p]: must be a string"),
    ("fsdp_config: {offload_params: maybe}", "fsdp_config.offload_params=maybe: must be true or false"),
    ("bf16: sometimes", "bf16=sometimes: must be true or false, or 'auto'"),
    ("excess_length_strategy: shrink", "excess_length_strategy=shrink: must be drop, truncate or raise"),
    ("save_steps: .nan", "save_steps=nan: must be"),
    ("seed: 1.5", "seed=1.5: must be a whole number"),
    ("optimizer: 3", "optimizer=3: must be a string"),
    ("deepspeed: true", "deepspeed=true: must be a string or a mapping"),
    ("deepspeed: 3", "deepspeed=3: must be a string or a mapping"),
    ("output_dir: true", "output_dir=true: must be a string, not true"),
    ("datasets: [{path: a, type: x}, {path: b, type: alpaca}]", "datasets.0.type=x: this prompt format is"),
    # What only our own checks find
    ("max_grad_norm: -1", "max_grad_norm=-1: must be 0 or more"),
    ("adapter: qlora\ntorch_compile: true\nlora_dropout: 1.5", "lora_dropout=1.5: must be below 1"),
    ("val_set_size: -1", "val_set_size=-1: must be 0 or more"),
]


@pytest.mark.parametrize(("line", "expected"), WRONG, ids=[line for line, _ in WRONG])
def test_a_value_of_the_wrong_type_is_one_line(line: str, expected: str) -> None:
    name = expected.partition("=")[0].partition(".")[0]
    base = "".join(kept for kept in AXOLOTL.splitlines(keepends=True) if not kept.startswith((f"{name}:", "adapter")))
    text = base + ("" if line.startswith("adapter") else "adapter: lora\n") + line + "\n"
    at = 1 + next(number for number, each in enumerate(text.splitlines()) if each.startswith(f"{name}:"))
    (found,) = mistakes(text)[:1]
    assert found.startswith(f"x.yml:{at}: {expected}")


def test_all_mistakes_are_reported_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yml").write_text(AXOLOTL + "warmup_steps: many\nrl: grpo\nmax_grad_norm: -1\npeft: [x]\n")
    assert run(monkeypatch, "x.yml", "-o", "mine.yaml") == 2
    output = capsys.readouterr()
    names = [line.split("=")[0] for line in output.err.splitlines()]
    assert names == [
        "error: x.yml:7: warmup_steps", "error: x.yml:8: rl", "error: x.yml:9: max_grad_norm", "error: x.yml:10: peft",
    ]  # fmt: skip
    assert not output.out and not Path("mine.yaml").exists()


def test_files_that_a_file_names_are_checked_as_well() -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": "high"}}')
    assert (
        "deepspeed=ds.json: ds.json: zero_optimization.stage=high: must be"
        in mistakes(FACTORY + "deepspeed: ds.json\n")[0]
    )
    Path("ds.json").write_text('{"zero_optimization": ')
    assert "ds.json: is not JSON" in mistakes(FACTORY + "deepspeed: ds.json\n")[0]
    for content, expected in (
        ([1], "dataset_info.json: [1]: must be a mapping"),
        (None, "dataset_info.json: none: must be a mapping"),
        ({"talks": 5}, "talks=5: must be a mapping"),
        ({"talks": TALKS | {"columns": {"messages": [1]}}}, "talks.columns.messages=[1]: must be a string"),
        ({"talks": TALKS | {"num_samples": "few"}}, "talks.num_samples=few: must be a whole number"),
        ({"talks": TALKS | {"num_samples": -3}}, "talks: num_samples=-3 must be 1 or more"),
    ):
        Path("data/dataset_info.json").write_text(json.dumps(content))
        assert mistakes(FACTORY)[0].startswith("x.yml:6: dataset=talks: ") and expected in mistakes(FACTORY)[0]
    Path("acc.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: x}\n")
    with pytest.raises(UserError, match=r"^--config_file=acc.yaml: acc.yaml: deepspeed_config.zero_stage=x: must be"):
        written(["accelerate", "launch", "--config_file", "acc.yaml", *TRL])


@pytest.mark.parametrize(("text", "trainer"), [
    ("base_model: model\ndatasets:\n  - {path: data.jsonl, type: chat_template}\n", "Axolotl"),
    ("model_name_or_path: model\nstage: sft\ndataset: x\n", "LLaMA-Factory"),
])  # fmt: skip
def test_one_setting_of_theirs_is_enough_where_the_user_says_that_the_file_is_theirs(
    text: str, trainer: str, tmp_path: Path
) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    assert read_foreign_config(tmp_path / "theirs.yaml", None).trainer == trainer


def test_arguments_of_a_command_line_are_named_as_typed() -> None:
    with pytest.raises(UserError) as caught:
        written([*TRL, "--warmup_steps", "many", "--lora_r", "big"])
    lines = ["--lora_r=big: must be a whole number", "--warmup_steps=many: must be a whole number"]
    assert sorted(str(caught.value).split("\nerror: ")) == lines
    Path("sft.yaml").write_text("packing: true\nlora_alpha: wide\n")
    with pytest.raises(UserError, match=r"^sft.yaml:2: lora_alpha=wide: must be a number"):
        written([*TRL, "--config", "sft.yaml"])
    config, _ = written([*TRL, "--run_name", "10", "--packing", "True", "--learning_rate", "2e-4"])
    assert (config.logging.run_name, config.dataset.packing, config.training.learning_rate) == ("10", True, 2e-4)


@pytest.mark.parametrize(("yes", "no"), [("yes", "no"), ("on", "off"), ("True", "False"), ("YES", "NO")])
def test_booleans_are_those_of_yaml_1_1(yes: str, no: str) -> None:
    config, _ = imported(
        AXOLOTL + f"load_in_4bit: {yes}\nlora_target_linear: {yes}\nfp16: {no}\nbf16: {yes}\nsample_packing: {no}\n"
        f"gradient_checkpointing: {no}\nrl: {no}\npeft_use_dora: {no}\n"
    )
    assert (config.adapter, config.lora.target_modules) == ("qlora", ("all-linear",))
    assert (config.training.precision, config.training.gradient_checkpointing) == ("bf16", "none")
    assert not config.dataset.packing and not config.lora.dora
    assert "do_train=false: this configuration does not train" in mistakes(FACTORY + f"do_train: {no}\n")[0]
    config, _ = imported(FACTORY + f"do_train: {yes}\npacking: {yes}\nsave_strategy: {no}\nuse_galore: {no}\n")
    assert config.dataset.packing and config.training.save_steps == 0


def test_numbers_are_those_of_yaml_1_1() -> None:
    config, _ = imported(AXOLOTL.replace("sequence_len: 64", "sequence_len: 4_096\nlora_r: 010"))
    assert (config.dataset.max_length, config.lora.r) == (4096, 8)
    assert yaml.safe_load("[4_096, 010]") == [4096, 8]


def test_of_a_key_that_is_written_twice_the_last_counts_where_it_does() -> None:
    config, text = imported(AXOLOTL + "lora_r: 4\nlora_r: 24\n")
    assert config.lora.r == 24 and "line 8, lora_r" in text
    assert mistakes(FACTORY + "lora_rank: 4\nlora_rank: 24\n")[0].startswith("x.yml:8: lora_rank: duplicate")


@pytest.mark.parametrize("name", ["a\nseed: 7\n.yml", "a\u2028seed: 7.yml", "a\x85seed: 7.yml", "a\x1bseed: 7.yml"])
def test_a_file_name_adds_no_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(name).write_text(AXOLOTL + '"b\\u2028seed: 8": 1\n"c\\nseed: 9": false\n', encoding="utf-8")
    assert run(monkeypatch, name, "-o", "mine.yaml") == 0
    assert load_config("mine.yaml").config.seed == 42
    text = Path("mine.yaml").read_text()
    assert all(letter.isprintable() or letter == "\n" for letter in text) and "seed: 7" in text.partition("\n\n")[0]


def test_an_imported_file_is_not_replaced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yml").write_text(AXOLOTL)
    Path("l.yml").write_text(FACTORY)
    Path("link.yml").symlink_to("x.yml")
    Path("info.json").symlink_to("data/dataset_info.json")
    for source, output in (("x.yml", "x.yml"), ("x.yml", "link.yml"), ("link.yml", "x.yml"), ("l.yml", "info.json")):
        assert run(monkeypatch, source, "--force", "-o", output) == 2
        assert f"--output {output}: was not written by zerolora" in capsys.readouterr().err
    assert Path("x.yml").read_text() == AXOLOTL and json.loads(Path("info.json").read_text()) == {"talks": TALKS}
    Path("talks.jsonl").write_text("mine")
    Path("d.yml").write_text(AXOLOTL.replace("path: org/tales", "path: talks.jsonl"))
    assert run(monkeypatch, "d.yml", "--force", "-o", "talks.jsonl") == 2
    assert "was not written by zerolora" in capsys.readouterr().err and Path("talks.jsonl").read_text() == "mine"
    Path("real.yaml").write_text("# zerolora train real.yaml\nseed: 1\n")
    Path("mine.yaml").symlink_to("real.yaml")
    assert run(monkeypatch, "x.yml", "--force", "-o", "mine.yaml") == 0
    assert Path("mine.yaml").is_symlink() and load_config("real.yaml").config.base_model == "org/small"


def test_a_pipe_or_device_is_not_replaced_by_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x.yml").write_text(AXOLOTL)
    os.mkfifo("pipe")
    Path("out").symlink_to("pipe")
    end, _ = os.pipe()
    for output in ("pipe", "out", f"/dev/fd/{end}"):
        assert run(monkeypatch, "x.yml", "--force", "-o", output) == 2
        assert f"--output {output}: is a device or a pipe; use a file" in capsys.readouterr().err
    assert Path("pipe").is_fifo()


def test_a_missing_file_of_accelerate_needs_a_stage_in_its_name() -> None:
    start = ["accelerate", "launch", "--config_file"]
    with pytest.raises(UserError, match=r"^--config_file=mine\.yaml: no such file"):
        written([*start, "mine.yaml", *TRL])
    config, text = written([*start, "configs/deepspeed_zero3.yaml", *TRL])
    assert config.zero.stage == 3 and "config_file: the file does not exist; using stage 3" in text
    for name, stage in (("zero2", 2), ("fsdp1", 3), ("fsdp2", 3)):
        assert written(["trl", "sft", *TRL[1:], "--accelerate_config", name])[0].zero.stage == stage
    config, text = written(["trl", "sft", *TRL[1:], "--accelerate_config", "multi_gpu"])
    assert "Without effect here: accelerate_config" in text


def test_system_prompts_in_a_column_are_used(folder: Path) -> None:
    from transformers import AutoTokenizer

    from trainer.data.cache import prepare_data
    from trainer.data.samples import Samples

    make_tokenizer(folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    turns = [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]
    Path("data/talks.json").write_text(json.dumps([{"conversations": turns, "character": "Be brief."}]))
    config, _ = imported(FACTORY)
    data = prepare_data(config.dataset, tokenizer, seed=1, cache_dir=folder / "cache", model_max_length=None)
    assert isinstance(data.train, Samples)
    assert "Be brief." in tokenizer.decode(next(iter(data.train)).input_ids)
    info = {"talks": TALKS | {"formatting": "openai", "tags": {"observation_tag": "result"}}}
    Path("data/dataset_info.json").write_text(json.dumps(info))
    dataset = imported(FACTORY)[0].dataset
    assert dataset.fields == {"from": "role", "value": "content", "system": "character"}
    assert dataset.roles == {"tool": ("result",)}


def test_losses_of_tokens_are_taken_over() -> None:
    """By the names of each trainer."""
    config, text = imported(FACTORY + "use_dft_loss: true\nmask_history: true\nneftune_noise_alpha: 5\n")
    assert (config.training.loss, config.training.neftune_noise_alpha) == ("dft", 5.0)
    assert config.dataset.train_on == ("last",)
    config, text = imported(FACTORY + "use_eaft_loss: true\neaft_alpha: 0.5\nenable_thinking: false\n")
    assert (config.training.loss, config.training.eaft_alpha) == ("eaft", 0.5)
    assert config.dataset.thinking == "empty" and "dataset.thinking: strip" in " ".join(text.split())
    config, text = imported(FACTORY + "label_smoothing_factor: 0.05\n")
    assert (config.training.loss, config.training.label_smoothing) == ("label_smoothing", 0.05)
    config, text = imported(AXOLOTL + "use_eaft: true\neaft_alpha: 2\neaft_k: 40\n")
    assert (config.training.loss, config.training.eaft_alpha) == ("eaft", 2.0)
    assert "divided by 3" in text and "eaft_k: 40: the entropy is computed from the 20" in " ".join(text.split())
    config, _ = written([*TRL, "--loss_type", "dft", "--neftune_noise_alpha", "5"])
    assert (config.training.loss, config.training.neftune_noise_alpha) == ("dft", 5.0)
    config, _ = written([*TRL, "--loss_type", "chunked_nll", "--label_smoothing_factor", "0"])
    assert config.training.loss == "nll"


def test_settings_with_a_counterpart_are_taken_over() -> None:
    config, text = imported(
        FACTORY + "new_special_tokens: <a>,<b>\nenable_thinking: no\ntrain_on_prompt: true\nddp_timeout: 7200\n"
        "save_strategy: epoch\nval_size: 0.1\neval_strategy: epoch\nearly_stopping_steps: 3\ndisable_shuffling: true\n"
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n"
    )
    training = config.training
    assert config.model.added_tokens == ("<a>", "<b>") and config.dataset.train_on == ("all",)
    assert (training.timeout_minutes, training.saves_per_epoch, training.evals_per_epoch) == (120, 1, 1)
    assert (training.early_stopping, training.min_lr_ratio, config.dataset.shuffle) == (3, 0.1, False)
    assert "enable_thinking: false" in text
    restarts = "lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 3}\n"
    assert imported(FACTORY + restarts)[0].training.lr_cycles == 3
    stable = "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 20, min_lr_ratio: 0.1}\n"
    training = imported(FACTORY + stable + "max_steps: 100\n")[0].training
    assert (training.lr_scheduler, training.decay_ratio, training.min_lr_ratio) == ("warmup_stable_decay", 0.2, 0.1)
    config, text = imported(
        AXOLOTL.replace("chat_template}", "chat_template, train_on_eos: last}")
        + "train_on_eot: all\nsave_strategy: 'no'\nauto_resume_from_checkpoints: true\nmax_steps: 50\neval_steps: 0.1\n"
        "val_set_size: 0.1\nfsdp_config: {activation_checkpointing: true, reshard_after_forward: false}\n"
    )
    assert "datasets.0: train_on_eos: last: only the token that ends" in text and "train_on_eot: all: only the" in text
    assert (config.training.save_steps, config.training.eval_steps) == (0, 5)
    assert config.training.resume_from_checkpoint == "auto" and config.zero.stage == 2
    assert config.training.gradient_checkpointing == "non_reentrant"
    source = "chat_template, message_field_training: {}}}"
    imported(AXOLOTL.replace("chat_template}", source.format("train")))
    with pytest.raises(UserError, match=r"message_field_training=learn: must be train, training or weight"):
        imported(AXOLOTL.replace("chat_template}", source.format("learn")))
    config, _ = written([*TRL, "--assistant_only_loss", "--save_strategy", "no", "--lr_scheduler_type", "linear"])
    assert config.dataset.train_on == ("assistant",) and config.training.save_steps == 0


def test_a_mixture_of_trl_is_a_mix() -> None:
    Path("sft.yaml").write_text(
        "model_name_or_path: org/small\nuse_peft: yes\neval_strategy: epoch\ntest_split_size: 0.1\ndatasets:\n"
        "  - {path: org/tales, name: long, split: 'train[:50%]'}\n  - {path: org/talks}\n"
    )
    config, _ = written(["trl", "sft", "--config", "sft.yaml"])
    assert [source.path for source in config.dataset.mix] == ["org/tales", "org/talks"]
    assert (config.dataset.val_split, config.training.evals_per_epoch) == (0.1, 1)


@pytest.mark.parametrize("script", ["nash_md.py", "sft_vlm.py", "mpo_vlm.py", "gkd.py", "online_dpo.py"])
def test_scripts_that_train_otherwise_are_refused(script: str) -> None:
    with pytest.raises(UserError, match=rf"^examples/{script}: .* not "):
        written(["python", f"examples/{script}", *TRL[1:]])


@pytest.mark.parametrize("table", [axolotl.KEYS, llamafactory.KEYS, trl.KEYS])
def test_every_row_leads_to_a_setting(table: Table) -> None:
    assert {key.to for key in table.values()} - {""} <= set(list_setting_names())


@pytest.mark.parametrize(
    "text", [AXOLOTL + "eval_steps: -5\n", FACTORY + "eval_steps: -5\n", AXOLOTL + "evals_per_epoch: -1\n"]
)
def test_a_negative_interval_is_refused_without_data_to_evaluate_on(text: str) -> None:
    with pytest.raises(UserError, match=r"^x.yml:7: eval.*=-[15]: must be 0 or more$"):
        imported(text)
    imported(text + "eval_strategy: 'no'\n")


def test_no_saves_within_the_run_are_no_saves_every_500_steps() -> None:
    assert imported(FACTORY + "save_steps: 0\n")[0].training.save_steps == 0
    assert imported(FACTORY)[0].training.save_steps == 500


def test_an_option_without_a_value_has_none_in_its_message() -> None:
    with pytest.raises(UserError, match=r"^--learning_rate: must be a number"):
        written([*TRL, "--learning_rate"])


def test_one_value_of_an_option_is_a_list() -> None:
    dpo = ["trl", "dpo", *TRL[1:], "--loss_type", "sigmoid", "hinge", "--loss_weights"]
    with pytest.raises(UserError, match=r"^--loss_weights=1: must have one number for each loss in loss_type$"):
        written([*dpo, "1"])
    assert dict(written([*dpo, "1", "0.5"])[0].preference.loss) == {"dpo": 1.0, "hinge": 0.5}


def test_a_missing_file_of_another_trainer_is_no_preset() -> None:
    with pytest.raises(UserError, match=r"^gone.yml: no such file; check its name$"):
        written(["gone.yml"])
