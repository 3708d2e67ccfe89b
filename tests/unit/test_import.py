"""`zerolora import`: files of other trainers, written for these tests, and what becomes of each of their settings."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from launcher.commands import main as zerolora
from launcher.importing.command import format_yaml, translate_arguments
from launcher.importing.common import CHAT_TEMPLATES, build_alpaca_prompts
from tests.imported import as_tree
from tests.tiny import make_tokenizer
from trainer.config import RunConfig, UserError, load_config
from trainer.config.load import recognize_trainer
from trainer.config.yaml_core import read_yaml

AXOLOTL = """\
base_model: org/small-llama
load_in_8bit: true
datasets:
  - path: org/tales
    type: chat_template
    field_messages: talk
    message_property_mappings: {role: from, content: value}
    roles: {assistant: [bard]}
    split: train[:10%]
    data_files: [tales/part-1.jsonl]
    name: long
chat_template: chatml
val_set_size: 0.05
dataset_prepared_path: prepared
output_dir: ./out/one
adapter: lora
sequence_len: 1024
sample_packing: true
lora_r: 24
lora_alpha: 12
lora_target_modules: 'model.language_model.layers.[\\d]+.(mlp|self_attn).(up|down|q)_proj'
wandb_project:
gradient_accumulation_steps: 3
micro_batch_size: 5
num_epochs: 2
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 3e-5
bf16: auto
tf32: true
gradient_checkpointing: offload
attn_implementation: flash_attention_2
warmup_ratio: 0.2
evals_per_epoch: 3
saves_per_epoch: 2
plugins: [some.Plugin]
liger_rope: true
neftune_noise_alpha: 5
special_tokens: {pad_token: "<pad>", eos_token: "<end>"}
"""
FACTORY = """\
model_name_or_path: org/small
stage: sft
finetuning_type: lora
lora_target: all
quantization_bit: 4
dataset: pairs, talks
template: chatml
cutoff_len: 512
max_samples: 50
output_dir: out
per_device_train_batch_size: 2
learning_rate: 1.0e-4
lr_scheduler_type: cosine
fp16: true
deepspeed: ds_z3_offload.json
ddp_timeout: 100
report_to: none
"""
INFO = {
    "pairs": {"file_name": "pairs.json", "columns": {"prompt": "ask", "response": "say"}},
    "talks": {
        "hf_hub_url": "org/talks",
        "formatting": "sharegpt",
        "split": "train_sft",
        "columns": {"messages": "turns", "tools": "tools"},
        "tags": {"role_tag": "role", "content_tag": "text", "user_tag": "user", "assistant_tag": "robot"},
    },
    "pictures": {"file_name": "p.json", "formatting": "sharegpt", "columns": {"images": "photos"}},
    "speeches": {"file_name": "s.json", "columns": {"audios": "audios"}},
    "choices": {"file_name": "c.json", "ranking": True},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(INFO))
    return tmp_path


def imported(text: str, *more: str) -> tuple[RunConfig, str]:
    """The configuration that a file becomes, and the text that it is read from."""
    Path("theirs.yml").write_text(text)
    return written(["theirs.yml", *more])


def written(words: list[str]) -> tuple[RunConfig, str]:
    translation = translate_arguments(words)
    text = format_yaml(translation, "mine.yaml")
    Path("mine.yaml").write_text(text)
    assert read_yaml(Path("mine.yaml")).tree == as_tree(translation), "what is written reads back"
    return load_config("mine.yaml").config, text


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        imported(text)
    line = str(caught.value)
    assert "\n" not in line and line.startswith("theirs.yml")
    return line


def test_an_axolotl_file_says_the_same_here() -> None:
    config, text = imported(AXOLOTL)
    data, training, lora = config.dataset, config.training, config.lora
    assert (config.base_model, config.adapter, config.output_dir) == ("org/small-llama", "qlora", "./out/one")
    assert (data.path, data.format, data.name, data.split) == ("org/tales", "messages", "long", "train[:10%]")
    assert data.fields == {"messages": "talk", "role": "from", "content": "value"}
    assert data.roles == {"assistant": ("bard",)} and data.data_files == ("tales/part-1.jsonl",)
    assert (data.max_length, data.packing, data.val_split, data.too_long) == (1024, True, 0.05, "drop")
    assert data.chat_template == CHAT_TEMPLATES["chatml"]
    assert (lora.r, lora.alpha, lora.dropout) == (24, 12.0, 0.0)
    assert lora.target_modules == (r".*layers.[\d]+.(mlp|self_attn).(up|down|q)_proj",)
    assert (training.batch_size, training.gradient_accumulation_steps, training.epochs) == (5, 3, 2.0)
    assert (training.optimizer, training.lr_scheduler, training.learning_rate) == ("paged_adamw_32bit", "cosine", 3e-5)
    assert (training.precision, training.gradient_checkpointing) == ("auto", "non_reentrant")
    assert training.offload_activations and training.warmup_ratio == 0.2 and config.model.pad_token == "<pad>"
    assert (training.evals_per_epoch, training.saves_per_epoch, training.neftune_noise_alpha) == (3, 2, 5.0)
    assert training.save_total_limit == 4
    head = " ".join(line.lstrip("# ") for line in text.partition("\n\n")[0].splitlines())
    assert "line 2, load_in_8bit: weights (per row), inputs (per token) and matmuls are int8" in head
    assert "Without effect here: dataset_prepared_path, liger_rope, plugins, tf32, wandb_project." in head
    assert "line 39, special_tokens: eos_token: the tokenizer's tokens and the" in head
    assert re.search(rf"\n  r: 24 +# line {AXOLOTL.splitlines().index('lora_r: 24') + 1}, lora_r\n", text)


@pytest.mark.parametrize("key", ["context_parallel_size", "sequence_parallel_degree"])
def test_axolotls_context_parallelism_is_imported(key: str) -> None:
    without_noise = AXOLOTL.replace("neftune_noise_alpha: 5", "")
    config, text = imported(f"{without_noise}{key}: 4\n")
    assert config.parallel.sequence == 4 and f"sequence: 4  # line 40, {key}" in re.sub(" +#", "  #", text)
    assert "parallel:" not in imported(f"{without_noise}{key}: 1\n")[1]
    assert "not supported with parallel.sequence=4" in refused(f"{AXOLOTL}{key}: 4\n"), "with noise on the embeddings"


def test_patterns_of_layers_are_taken_over(folder: Path) -> None:
    patterns = "lora_rank_pattern: {v_proj: 32}\nlora_alpha_pattern: {v_proj: 64}\n"
    lines = (line for line in AXOLOTL.splitlines() if not line.startswith("lora_target_modules"))
    config, _ = imported("\n".join(lines) + f"\nlora_target_modules: 'model\\.layers\\.1\\.[a-z_.]+'\n{patterns}")
    assert config.lora.target_modules == (r"model\.layers\.1\.[a-z_.]+",)
    assert (config.lora.rank_pattern, config.lora.alpha_pattern) == ({"v_proj": 32}, {"v_proj": 64.0})


def test_experts_are_adapted_where_they_were(folder: Path) -> None:
    """PEFT's all-linear means layers; experts that are one tensor have to be named."""
    linear = AXOLOTL.replace("lora_target_modules: 'model", "lora_target_linear: true\nlora_modules: 'model")
    config, text = imported(linear)
    assert config.lora.target_modules == ("all-linear",) and not config.lora.experts
    assert re.search(r"\n  experts: false +# the default of Axolotl\n", text)
    config, _ = imported(linear + "lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]\n")
    assert config.lora.experts
    assert config.lora.target_parameters == ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    config, _ = imported(AXOLOTL)
    assert config.lora.experts, "of names PEFT takes gate_proj and so on for those of experts"
    assert not imported(FACTORY)[0].lora.experts
    words = "sft.py --model_name_or_path m --dataset_name d --use_peft --lora_target_modules all-linear"
    config, _ = written([*words.split(), "--lora_target_parameters", "experts.down_proj"])
    assert config.lora.target_parameters == ("experts.down_proj",)


def test_axolotls_defaults_are_written_out() -> None:
    config, text = imported(
        "base_model: m\ndatasets: [{path: d.jsonl, type: alpaca}]\nadapter: qlora\nload_in_4bit: true\n"
        "micro_batch_size: 2\nnum_epochs: 1\nlearning_rate: 1e-4\nlora_r: 8\nlora_alpha: 16\nval_set_size: 0.1\n"
    )
    assert (config.adapter, config.dataset.max_length, config.output_dir) == ("qlora", 512, "./model-out")
    assert (config.training.evals_per_epoch, config.training.saves_per_epoch) == (1, 1)
    assert config.lora.target_modules == ("q_proj", "v_proj")
    data = config.dataset
    assert (data.format, data.template, data.template_without_input) == ("custom", *build_alpaca_prompts("instruct"))
    assert data.fields == {"completion": "output"}
    assert "# the default of Axolotl" in text


def test_imported_prompts_are_what_is_trained_on(folder: Path) -> None:
    from transformers import AutoTokenizer

    from trainer.data.cache import prepare_data
    from trainer.data.samples import Samples

    make_tokenizer(folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Name one.", "input": "", "output": "Red."},
        {"instruction": "long " * 400, "input": "", "output": "Left out."},
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, _ = imported(
        "base_model: m\ndatasets: [{path: rows.jsonl, type: alpaca}]\nadapter: lora\nsequence_len: 400\n"
        "micro_batch_size: 2\nlearning_rate: 1e-4\nlora_target_linear: true\nsample_packing: false\n"
    )
    data = prepare_data(config.dataset, tokenizer, seed=1, cache_dir=folder / "cache", model_max_length=None)
    assert isinstance(data.train, Samples) and data.stats.too_long == 1
    head = "Below is an instruction that describes a task"
    tail = ". Write a response that appropriately completes the request.\n\n### Instruction:\n"
    assert [tokenizer.decode(sample.input_ids) for sample in data.train] == [
        f"{head}, paired with an input that provides further context{tail}Add.\n\n### Input:\n1 2\n\n"
        "### Response:\n3<|im_end|>",
        f"{head}{tail}Name one.\n\n### Response:\nRed.<|im_end|>",
    ]
    learnt = [[i for i, on in zip(s.input_ids, s.loss_weights, strict=True) if on] for s in data.train]
    assert [tokenizer.decode(ids) for ids in learnt] == ["3<|im_end|>", "Red.<|im_end|>"]


def test_prompts_and_texts_of_axolotl() -> None:
    config, _ = imported(
        AXOLOTL.replace("type: chat_template", "type: {field_instruction: q, field_output: a, "
                        "format: 'Q: {instruction}\\n{input} A:', no_input_format: 'Q: {instruction} A:', "
                        "system_prompt: 'Say {x}. '}").replace("field_messages: talk", "")
        .replace("message_property_mappings: {role: from, content: value}", "")
        .replace("roles: {assistant: [bard]}", "")
    )  # fmt: skip
    data = config.dataset
    assert data.fields == {"instruction": "q", "completion": "a"}
    assert data.template == "Say {{x}}. Q: {instruction}\\n{input} A:"
    config, _ = imported(
        "base_model: m\npretraining_dataset: [{path: c4, name: en, text_column: body}]\nmax_steps: 50\n"
        "sequence_len: 64\nmicro_batch_size: 1\nadapter: lora\nlearning_rate: 1e-4\nlora_target_linear: true\n"
    )
    assert (config.dataset.streaming, config.dataset.format, config.training.max_steps) == (True, "completion", 50)
    assert (config.dataset.name, config.dataset.fields) == ("en", {"text": "body"})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("rl: grpo\n", "theirs.yml:40: rl=grpo: only the losses"),
        ("relora: true\n", "theirs.yml:40: relora=true: ReLoRA is not supported"),
    ],
)
def test_unsupported_keys_have_one_reason(change: str, line: str) -> None:
    assert refused(AXOLOTL + change).startswith(line)


def test_unsupported_values_are_refused() -> None:
    assert "optimizer=sgd: optimizers here are" in refused(AXOLOTL.replace("paged_adamw_32bit", "sgd"))
    assert "optimizer=schedule_free_adamw: replaces the schedule" in refused(
        AXOLOTL.replace("paged_adamw_32bit", "schedule_free_adamw")
    )
    assert "type=context_qa: this prompt" in refused(AXOLOTL.replace("type: chat_template", "type: context_qa"))
    assert "HQQ weights are not supported" in refused(AXOLOTL.replace("small-llama", "small-HQQ"))


@pytest.mark.parametrize(
    ("theirs", "ours", "stage"),
    [("paged_adamw_8bit", "paged_adamw_8bit", 2), ("lion_32bit", "lion", 2), ("adafactor", "adafactor", 0)],
)
def test_optimizers_have_the_same_names_here(theirs: str, ours: str, stage: int) -> None:
    config, _ = imported(AXOLOTL.replace("paged_adamw_32bit", theirs))
    assert (config.training.optimizer, config.zero.stage) == (ours, stage)


def test_llama_factorys_muon() -> None:
    muon, _ = imported(FACTORY.replace("deepspeed: ds_z3_offload.json\n", "use_muon: true\n"))
    assert (muon.training.optimizer, muon.zero.stage) == ("muon", 0)


def test_a_llama_factory_file_says_the_same_here(folder: Path) -> None:
    config, text = imported(FACTORY)
    training, lora = config.training, config.lora
    assert (config.adapter, lora.r, lora.alpha, lora.target_modules) == ("qlora", 8, 16.0, ("all-linear",))
    pairs, talks = config.dataset.mix
    assert (pairs.path, pairs.format, pairs.max_samples) == (f"{folder}/data/pairs.json", "alpaca", 50)
    assert pairs.fields == {"instruction": "ask", "output": "say"}
    assert (talks.path, talks.split, talks.format) == ("org/talks", "train_sft", "sharegpt")
    assert talks.fields == {"conversations": "turns", "from": "role", "value": "text"}
    assert talks.roles == {"assistant": ("robot",)}
    assert (training.epochs, training.save_total_limit, training.warmup_steps) == (3.0, None, 0)
    assert (training.precision, training.gradient_checkpointing) == ("fp16", "non_reentrant")
    assert (config.zero.stage, config.zero.offload_optimizer, config.zero.offload_parameters) == (3, True, True)
    assert config.logging.report_to == () and config.dataset.max_length == 512
    assert "the file does not exist; using stage 3, as its name suggests" in " ".join(text.split())
    assert training.timeout_minutes == 100 / 60


def test_targets_that_a_model_does_not_have_are_left_out() -> None:
    listed = re.sub("lora_target_modules: .*", "lora_target_modules: [q_proj, gate_proj]", AXOLOTL)
    config, text = imported(listed.replace("org/small-llama", "zai-org/GLM-4-32B-0414"))
    assert config.lora.target_modules == ("q_proj",) and "gate_proj: this model has no such layers" in text
    assert imported(listed)[0].lora.target_modules == ("q_proj", "gate_proj")
    experts = re.sub("lora_target_modules: .*", "lora_target_parameters: [mlp.experts.down_proj]", AXOLOTL)
    config, text = imported(experts.replace("org/small-llama", "org/DeepSeek-V4-Flash"))
    assert config.lora.target_modules == ("mlp.experts",) and not config.dataset.packing
    assert "packed documents attend to each other" in " ".join(text.split("#"))


def test_llama_factorys_other_kinds() -> None:
    plain, _ = imported(FACTORY.replace("stage: sft", "stage: pt").replace("pairs, talks", "pairs"))
    assert (plain.dataset.format, plain.dataset.fields, plain.dataset.packing) == ("completion", {"text": "ask"}, True)
    whole, _ = imported(FACTORY.replace("finetuning_type: lora", "finetuning_type: full"))
    assert whole.adapter == "none"
    assert "choices: is preference data; use stage: dpo" in refused(FACTORY.replace("pairs, talks", "choices"))
    assert "speeches: data with video or audio" in refused(FACTORY.replace("pairs, talks", "speeches"))
    assert "stage=ppo: must be sft, pt" in refused(FACTORY.replace("stage: sft", "stage: ppo"))
    assert "nobody is missing" in refused(FACTORY.replace("pairs, talks", "nobody"))
    assert "no elsewhere/dataset_info.json in the folder" in refused(FACTORY + "dataset_dir: elsewhere\n")


def test_images_are_imported_for_models_that_read_them() -> None:
    switches = "processor_type: AutoProcessor\nskip_prepare_dataset: true\nremove_unused_columns: false\n"
    config, text = imported(AXOLOTL.replace("org/small-llama", "org/Qwen2.5-VL-7B") + switches)
    assert config.dataset.format == "messages" and config.vision.train == "none"
    assert "only answers are trained on" in " ".join(text.split())
    assert config.dataset.chat_template is None, "the table's template has no images"
    listed = re.sub("lora_target_modules: .*", "lora_target_modules: [gate_proj, q_proj]", AXOLOTL) + switches
    for read in ("org/GLM-4.6V-Flash", "org/PaddleOCR-VL"):
        config, _ = imported(listed.replace("org/small-llama", read))
        assert config.vision.train == "lora", "PEFT finds the names in the tower as well"
    tower = AXOLOTL.replace("model.language_model.layers", "(model.language_model|model.visual).*layers") + switches
    config, _ = imported(tower.replace("org/small-llama", "org/PaddleOCR-VL"))
    assert config.vision.train == "lora" and config.lora.target_modules[0].startswith("(model.language_model|")
    for unread in ("org/GLM-4.6V", "org/Llama-3.2-11B-Vision-Instruct", "org/gemma-3n-E2B-it"):
        assert f"theirs.yml:1: base_model={unread}: is not trained on images" in refused(
            AXOLOTL.replace("org/small-llama", unread) + switches
        )
    assert "datasets" in refused(AXOLOTL.replace("org/tales", "org/text-audio") + switches)

    pictures = FACTORY.replace("pairs, talks", "pictures")
    config, _ = imported(pictures.replace("org/small", "org/Qwen3-VL-4B"))
    assert (config.dataset.fields, config.dataset.max_pixels) == ({"images": "photos"}, 768 * 768)
    sizes = "image_max_pixels: 9000\nimage_min_pixels: 800\nfreeze_vision_tower: false\n"
    config, _ = imported(pictures.replace("org/small", "org/Qwen3-VL-4B") + sizes)
    assert (config.dataset.min_pixels, config.dataset.max_pixels, config.vision.train) == (800, 9000, "lora")
    config, _ = imported(pictures.replace("org/small", "org/gemma-3-4b"))
    assert config.dataset.max_pixels is None
    problem = "model_name_or_path=org/MOSS-VL: is not trained on images"
    assert problem in refused(pictures.replace("org/small", "org/MOSS-VL"))


def test_axolotls_batch_size_becomes_accumulation() -> None:
    whole = AXOLOTL.replace("gradient_accumulation_steps: 3", "batch_size: 20")
    assert imported(whole)[0].training.gradient_accumulation_steps == 4
    assert "batch_size=20: gradient_accumulation_steps is set as well" in refused(AXOLOTL + "batch_size: 20\n")


V1 = """\
model: org/small
peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all}
quant_config: {name: bnb, quantization_bit: 4}
dist_config: {name: fsdp2, offload_params: true}
kernel_config: {name: auto}
train_dataset: data/sources.yaml
output_dir: out
micro_batch_size: 2
cutoff_len: 512
learning_rate: 1.0e-4
max_steps: 10
"""


def test_llama_factorys_second_layout_says_the_same_here() -> None:
    Path("data/talks.json").write_text("[]")
    sources = "one: {path: data/talks.json, source: local, converter: alpaca, size: 5}\n"
    Path("data/sources.yaml").write_text(
        sources + "two: {path: org/talks, split: part, converter: sharegpt, weight: 2}"
    )
    config, text = imported(V1)
    assert (config.base_model, config.adapter, config.output_dir) == ("org/small", "qlora", "out")
    assert (config.lora.r, config.lora.alpha, config.lora.dropout, config.lora.experts) == (16, 32.0, 0.05, False)
    first, second = config.dataset.mix
    assert (first.path, first.format, first.max_samples) == (str(Path("data/talks.json").absolute()), "alpaca", 5)
    assert (second.path, second.format, second.split, second.weight) == ("org/talks", "sharegpt", "part", 2.0)
    training = config.training
    assert (training.batch_size, training.max_steps, training.precision) == (2, 10, "bf16")
    assert (training.lr_scheduler, training.weight_decay, training.save_steps) == ("constant", 0.01, 0)
    assert config.zero.stage == 3 and config.zero.offload_parameters and training.gradient_checkpointing
    assert "kernel_config" in text.partition("Without effect here: ")[2]

    Path("data/sources.yaml").write_text("one: {path: org/pairs, converter: pair}")
    config, _ = imported(V1 + "pref_loss: simpo\npref_beta: 2.0\n")
    assert (config.task, config.preference.loss, config.preference.beta) == ("preference", {"simpo": 1.0}, 2.0)
    assert config.dataset.format == "preference" and config.dataset.max_length == 1024
    assert imported(V1.replace("model: org", "model_class: cls\nmodel: org"))[0].task == "reward"
    assert imported(V1.replace("{name: bnb, quantization_bit: 4}", "{name: bnb}"))[0].adapter == "qlora"
    full = (
        V1.replace("peft_config", "#").replace("quant_config", "#").replace("fsdp2", "deepspeed, config_file: z2.json")
    )
    full += "pref_loss: simpo\n"
    assert imported(full)[0].adapter == "none" and imported(full)[0].zero.stage == 2
    alone = full.replace("dist_config", "#") + "optim_config: {name: muon}\n"
    assert "optim_config.name=muon" in refused(alone)  # trains only matrices


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("peft_config: {name: freeze}", "theirs.yml:2: peft_config.name=freeze: only LoRA"),
        ("train_dataset: gone.yaml", "theirs.yml:6: train_dataset=gone.yaml: must be a YAML file"),
        (
            "train_dataset: org/talks",
            "theirs.yml:6: train_dataset=org/talks: must be a YAML file",
        ),
        ("train_dataset: data/raw.yaml", "data/raw.yaml: one: set converter to one of alpaca, sharegpt, pair"),
        ("lr_scheduler_config: {name: cosine}", "lr_scheduler_config=.*: LLaMA-Factory has no schedules"),
        ("quant_config: {name: hqq}", "theirs.yml:3: quant_config.name=hqq: must be auto or bnb"),
    ],
)
def test_mistakes_in_llama_factorys_second_layout(change: str, problem: str) -> None:
    Path("data/sources.yaml").write_text("one: {path: org/talks, converter: alpaca}")
    Path("data/raw.yaml").write_text("one: {path: org/talks}")
    key = change.partition(":")[0]
    lines = [change if line.startswith(f"{key}:") else line for line in V1.splitlines()]
    assert re.match(f"(?s).*{problem}", refused("\n".join(lines if change in lines else [*lines, change])))


def test_a_command_line_of_trl_says_the_same_here() -> None:
    Path("zero3.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
        "deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: none}\n"
    )
    words = (
        "accelerate launch --config_file zero3.yaml --num_processes 4 sft.py --model_name_or_path org/small "
        "--dataset_name org/talks --learning_rate 2.0e-4 --num_train_epochs 1 --packing --max_length 256 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps=8 --eval_strategy steps --eval_steps 100 "
        "--use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj k_proj --load_in_4bit "
        "--assistant_only_loss --output_dir out --no_gradient_checkpointing --report_to wandb --push_to_hub"
    ).split()
    config, text = written(words)
    assert (config.adapter, config.lora.r, config.lora.alpha, config.lora.dropout) == ("qlora", 32, 16.0, 0.05)
    assert config.lora.target_modules == ("q_proj", "k_proj") and not config.quantization.double_quant
    assert (config.training.batch_size, config.training.gradient_accumulation_steps) == (2, 8)
    assert (config.training.learning_rate, config.training.lr_scheduler) == (2e-4, "linear")
    assert (config.training.eval_steps, config.training.gradient_checkpointing) == (100, "none")
    assert config.dataset.evaluation is not None and config.dataset.evaluation.split == "test"
    assert (config.dataset.max_length, config.dataset.packing, config.dataset.train_on) == (256, True, ("assistant",))
    assert (config.zero.stage, config.zero.offload_optimizer, config.zero.offload_parameters) == (3, True, False)
    assert "push_to_hub: true: upload with `zerolora push RUN REPO`" in text
    with pytest.raises(UserError, match=r"grpo\.py: .*online methods"):
        translate_arguments("python grpo.py --model_name_or_path m --dataset_name d".split())


def test_kto_says_the_same_here() -> None:
    source = "datasets: [{path: org/answers, type: %s}]\n"
    theirs = re.sub(r"datasets:\n(?:[ -].*\n)+", source % "llama3.argilla", AXOLOTL)
    config, _ = imported(theirs + "rl: kto\nrl_beta: 0.3\nkto_desirable_weight: 0.2\n")
    preference = config.preference
    assert (config.task, dict(preference.loss), preference.beta) == ("preference", {"kto": 1.0}, 0.3)
    assert (preference.desirable_weight, config.dataset.format) == (0.2, "unpaired")
    assert config.dataset.fields == {"instruction": "instruction"}
    named = "{field_prompt: p, field_completion: c, field_label: good}"
    config, _ = imported(theirs.replace("llama3.argilla", named) + "rl: kto\n")
    assert config.dataset.fields == {"prompt": "p", "completion": "c", "label": "good"}
    info = json.loads(Path("data/dataset_info.json").read_text())
    columns = {"messages": "talk", "kto_tag": "good"}
    info["answers"] = {"file_name": "a.json", "formatting": "sharegpt", "columns": columns}
    info["answers"]["tags"] = {"role_tag": "who", "content_tag": "says"}
    Path("data/dataset_info.json").write_text(json.dumps(info))
    factory = FACTORY.replace("stage: sft", "stage: kto\nkto_chosen_weight: 1.5")
    config, _ = imported(factory.replace("pairs, talks", "answers"))
    assert (dict(config.preference.loss), config.preference.desirable_weight) == ({"kto": 1.0}, 1.5)
    assert config.dataset.format == "unpaired"
    assert config.dataset.fields == {"conversations": "talk", "role": "who", "content": "says", "label": "good"}
    assert "answers: is preference data; use stage: kto" in refused(FACTORY.replace("pairs, talks", "answers"))
    assert "pairs: has no labels" in refused(factory)
    words = "trl kto --model_name_or_path m --dataset_name d --use_peft --undesirable_weight 0.5 --max_length 512"
    config, text = written(words.split())
    assert (dict(config.preference.loss), config.preference.undesirable_weight) == ({"kto": 1.0}, 0.5)
    assert config.dataset.max_length == 1024 and "dataset.format: unpaired" in " ".join(text.split())
    with pytest.raises(UserError, match="loss_type=apo_zero_unpaired: the only loss for labeled answers"):
        translate_arguments([*words.split(), "--loss_type", "apo_zero_unpaired"])


def test_preference_training_says_the_same_here() -> None:
    """Their length counts one answer, ours both."""
    source = "datasets: [{path: org/pairs, split: train_prefs, type: %s}]"
    theirs = re.sub(r"datasets:\n(?:[ -].*\n)+", source % "chatml.intel" + "\n", AXOLOTL) + "rl: ipo\nrl_beta: 0.3\n"
    config, text = imported(theirs)
    assert (config.task, dict(config.preference.loss), config.preference.beta) == ("preference", {"ipo": 1.0}, 0.3)
    assert config.dataset.fields == {"instruction": "question"} and config.dataset.format == "preference"
    assert "counts both answers of a pair" in " ".join(text.split())
    config, _ = imported(FACTORY.replace("stage: sft", "stage: dpo\npref_ftx: 0.1").replace("pairs, talks", "choices"))
    assert (config.task, dict(config.preference.loss)) == ("preference", {"dpo": 1.0, "sft": 0.1})
    assert (config.dataset.format, config.dataset.max_length) == ("preference", 1024)
    config, _ = imported(FACTORY.replace("stage: sft", "stage: rm").replace("pairs, talks", "choices"))
    assert (config.task, config.dataset.format, config.dataset.max_length) == ("reward", "preference", 1024)
    assert "choices: is preference data; use stage: dpo" in refused(FACTORY.replace("pairs, talks", "choices"))
    for stage in ("dpo", "rm"):
        assert "pairs: has no pairs" in refused(FACTORY.replace("stage: sft", f"stage: {stage}"))
    mixed = "pref_ftx: 0.1\npref_bco_weight: 0.2\nld_alpha: 0.5"
    config, text = imported(FACTORY.replace("stage: sft", f"stage: dpo\n{mixed}").replace("pairs, talks", "choices"))
    assert dict(config.preference.loss) == {"dpo": 1.0, "sft": 0.1, "bco_pair": 0.2}
    assert config.preference.length_weight == 0.5 and "not shifted by their running mean" in " ".join(text.split())
    config, _ = imported(theirs.replace("rl: ipo", "rl: dpo\nrpo_alpha: 0.7\ndpo_use_weighting: true"))
    assert dict(config.preference.loss) == {"dpo": 1.0, "sft": 0.7} and config.preference.weighting == "wpo"
    words = "trl dpo --model_name_or_path m --dataset_name d --use_peft --beta 0.2 --max_length 512 --loss_type robust"
    config, _ = written([*words.split(), "--label_smoothing", "0.1", "--precompute_ref_log_probs"])
    assert (dict(config.preference.loss), config.preference.beta) == ({"robust": 1.0}, 0.2)
    assert (config.preference.label_smoothing, config.preference.reference) == (0.1, "cached")
    assert config.training.learning_rate == 1e-6
    assert (config.dataset.max_length, config.dataset.format) == (1024, "auto")
    several = words.replace("--loss_type robust", "--loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1")
    config, _ = written([*several.split(), "--ld_alpha", "0.5", "--use_weighting"])
    assert dict(config.preference.loss) == {"dpo": 0.8, "bco_pair": 0.2, "sft": 1.0}
    assert (config.preference.length_weight, config.preference.weighting) == (0.5, "wpo")
    config, _ = written([*words.replace("robust", "sigmoid").split(), "--rpo_alpha", "0.7"])
    assert dict(config.preference.loss) == {"dpo": 1.0, "sft": 0.7}
    for wrong, message in (
        ("aot", "loss_type=aot: aot: only the losses"),
        ("ipo --loss_weights 1 2", "one number for each loss"),
    ):
        with pytest.raises(UserError, match=message):
            translate_arguments(words.replace("robust", wrong).split())


def test_reward_models_are_imported() -> None:
    source = "datasets: [{path: org/pairs, type: bradley_terry.chat_template}]\n"
    theirs = re.sub(r"datasets:\n(?:[ -].*\n)+", source, AXOLOTL) + "reward_model: true\nnum_labels: 1\n"
    config, text = imported(theirs + "center_rewards_coefficient: 0.01\n")
    assert (config.task, config.reward.center, config.dataset.format) == ("reward", 0.01, "preference")
    assert config.dataset.fields == {"instruction": "input"}
    assert "counts both answers of a pair" in " ".join(text.split())
    assert "num_labels=2: a reward model has one output" in refused(theirs.replace("num_labels: 1", "num_labels: 2"))
    assert "process_reward_model=true: only the losses" in refused(theirs + "process_reward_model: true\n")
    words = "trl reward --model_name_or_path m --dataset_name d --use_peft --lora_task_type SEQ_CLS --max_length 512"
    config, _ = written([*words.split(), "--center_rewards_coefficient", "0.02"])
    assert (config.task, config.reward.center, config.dataset.max_length) == ("reward", 0.02, 1024)
    assert config.training.learning_rate == 1e-4


def test_the_command_writes_a_file_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs.yml").write_text(AXOLOTL)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["zerolora", *words])
        return zerolora()

    assert run("import", "theirs.yml", "-o", "mine.yaml") == 0
    assert "Next: zerolora validate mine.yaml" in capsys.readouterr().err
    assert load_config("mine.yaml").config.lora.r == 24
    assert run("import", "theirs.yml", "-o", "mine.yaml") == 2
    assert "mine.yaml: already exists" in capsys.readouterr().err
    assert run("import", "theirs.yml") == 0
    assert capsys.readouterr().out == Path("mine.yaml").read_text()
    assert run("train", "theirs.yml") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: theirs.yml: configuration for Axolotl (unsupported settings: ")
    assert "zerolora import theirs.yml" in line
    assert run("import", "mine.yaml") == 2 and "run `zerolora train`" in capsys.readouterr().err
    assert run("import", "--", "--model_name_or_path", "m", "--dataset_name", "d", "--use_peft") == 0
    assert "# the default of TRL" in capsys.readouterr().out


def test_each_trainer_is_recognised_and_ours_is_not() -> None:
    assert recognize_trainer(yaml.safe_load(AXOLOTL)) == "Axolotl"
    assert recognize_trainer(yaml.safe_load(FACTORY)) == "LLaMA-Factory"
    for file in (Path(__file__).parents[2] / "configs").glob("*.yaml"):
        assert recognize_trainer(yaml.safe_load(file.read_text())) is None, file


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_written_out_chat_templates_train_the_answers(name: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    from trainer.data.conversations import ChatEncoder
    from trainer.data.records import Conversation

    make_tokenizer(folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    marks = ["<|eot_id|>", "<end_of_turn>", "<|end|>", "<bos>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks, "bos_token": "<bos>"})
    encoder = ChatEncoder(tokenizer, CHAT_TEMPLATES[name], ("assistant",), None)
    turns = [("system", "be brief"), ("user", "why"), ("assistant", "so"), ("user", "and"), ("assistant", "then")]
    chat = Conversation([{"role": role, "content": text} for role, text in turns])
    (encoded,) = encoder.encode([chat], ["record 1"])
    learnt = tokenizer.decode(
        [token for token, trained in zip(encoded.input_ids, encoded.loss_weights, strict=True) if trained]
    )
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>"}
    assert learnt.replace("\n", "") == f"so{end.get(name, '<|end|>')}then{end.get(name, '<|end|>')}"
    whole = tokenizer.decode(encoded.input_ids)
    assert "be brief" in whole and whole.count("assistant" if "gemma" not in name else "model") == 2
