"""Mistakes of the user: one line with the setting, its value and the fix, exit code 2, and nothing written.

The first table goes through `zerolora train`, which reads the configuration before it starts any process; the second
through `zerolora prepare`, which looks at model, tokenizer, data and folders before a weight is loaded.
"""

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from launcher.commands import main as zerolora
from tests.tiny import make_model, make_tokenizer, write_chats
from trainer.config import CommandParser
from trainer.config.command_line import parse_positive_int

GOOD = "base_model: some/model\noutput_dir: runs/x\ndataset: {path: data.jsonl}\n"

# name: (text of the file, or None for none at all; what the line must hold)
FILES: dict[str, tuple[str | bytes | None, tuple[str, ...]]] = {
    "missing file": (None, ("config.yaml: no such file", "configs/")),
    "empty file": ("", ("config.yaml: is empty", "such as `base_model:")),
    "a list": ("- base_model\n", ("config.yaml: is a list",)),
    "JSON lines": (
        '{"text": "a"}\n{"text": "b"}\n',
        ("config.yaml: contains data; pass the run's YAML file, and set",),
    ),
    "records": ('[{"text": "a"},\n {"text": "b"}]\n', ("config.yaml: contains data; pass the run's YAML file",)),
    "a model": ("model_type: llama\nvocab_size: 9\n", ("config.yaml: is a model's configuration, not a run's; pass",)),
    "an adapter": ("peft_type: LORA\nbias: none\n", ("config.yaml: is an adapter's configuration, not a run's",)),
    "typed": (GOOD + "training:\n  learning_rate: 2e4\n", ("training.learning_rate=2e4: must be 1 or less (config",)),
    "plain text": ("hello\n", ("config.yaml: is a single value",)),
    "bracket left open": ("lora: {r: 8\n", ("not valid YAML at line 2, column 1",)),
    "tab": ("lora:\n\tr: 8\n", ("not valid YAML at line 2, column 1", "indent with spaces, not tabs")),
    "not text": (b"\xff\xfe\x00", ("config.yaml: line 1: byte 0xff is not UTF-8",)),
    "a date": (GOOD + "seed: 2026-09-09\n", ("seed=2026-09-09: must be a whole number (config.yaml:4)",)),
    "code in a tag": (GOOD + "seed: !!python/object/apply:os.getpid []\n", ("not valid YAML at line 4", "os.getpid")),
    "section twice": (
        GOOD + "lora: {r: 8}\nlora: {r: 9}\n",
        ("lora: duplicate (line 5, first in line 4)", "keep one"),
    ),
    "setting twice": (GOOD + "lora:\n  r: 8\n  r: 9\n", ("r: duplicate (line 6, first in line 5)", "keep one")),
    "two names of one setting": (GOOD + "lora_r: 8\nlora: {r: 9}\n", ("lora.r: also given as lora_r", "keep one")),
    "list as a name": (
        "? [a, b]\n: 1\n" + GOOD,
        ("config.yaml: not valid YAML at line 1, column 3: a list or mapping as a key",),
    ),
    "no model": ("output_dir: x\ndataset: {path: d}\n", ("base_model: missing", "write `base_model: ...`")),
    "no data": (
        "base_model: m\noutput_dir: x\n",
        ("dataset.path: missing", "such as dataset.path=train.jsonl", "instruction + output"),
    ),
    "value left out": ("base_model:\noutput_dir: x\ndataset: {path: d}\n", ("base_model: empty; write a value",)),
    "section as a list": (
        GOOD + "training:\n  - epochs\n",
        ("training=[epochs]: must be a section", "training.epochs"),
    ),
    "unknown in a mix": (
        "base_model: m\noutput_dir: x\ndataset:\n  mix:\n    - {path: a, weigth: 2}\n",
        ("dataset.mix.0.weigth: unknown setting", "did you mean dataset.mix.0.weight?"),
    ),
    "negative weight in a mix": (
        "base_model: m\noutput_dir: x\ndataset:\n  mix:\n    - {path: a}\n    - {path: b, weight: -2}\n",
        ("dataset.mix.1.weight=-2: must be above 0",),
    ),
}

# overrides, separated by ` ; `: what the line must hold
SETTINGS: dict[str, tuple[str, ...]] = {
    "lora.r": ("lora.r: not an override; write lora.r=VALUE",),
    "=5": ("=5: not an override",),
    "lora.r ; 8": ("lora.r: not an override; write lora.r=VALUE",),
    "base_model= m": ("base_model= m: begins or ends with a space; remove it",),
    "dataset.cache_dir=s3://b/c": ("dataset.cache_dir=s3://b/c: is a URL; use a folder on this machine",),
    "model.rope_scaling={rope_type: yarn, factor: 4}": (
        "model.rope_scaling.rope_type: unknown setting", "did you mean model.rope_scaling.type?",
    ),
    "model.revision=''": ("model.revision='': empty; write a value, or remove the setting",),
    "lora.rnak=8": ("lora.rnak: unknown setting", "did you mean lora.r?"),
    "lerning_rate=1": ("lerning_rate: unknown setting", "did you mean training.learning_rate?"),
    "dataset.lenght=9": ("dataset.lenght: unknown setting",),
    "qqq=1": ("qqq: unknown setting", "`zerolora config --schema` lists all"),
    "zero.extra.data_types.grad_accum_dtype=fp32": ("zero.extra.data_types=", "checkpoints do not", "remove it"),
    "zero.extra.prescale_gradient=true": ("=true: unknown DeepSpeed key", "did you mean prescale_gradients?"),
    "zero.extra={abc: {x: 1}}": ("zero.extra.abc={x: 1}: unknown DeepSpeed key; remove it",),
    "deepspeed=ds.json": ("deepspeed=ds.json: not a zerolora setting", "zero.extra"),
    "lora=5": ("lora=5: must be a section", "`lora.r=...`"),
    "seed.x=5 ; seed=1 ; seed.y=2": ("seed.y=2: seed is 1, not a section",),
    "adapter=qlorra": ("adapter=qlorra: must be 'lora', 'qlora' or 'none'",),
    "lora.r=0": ("lora.r=0: must be 1 or more",),
    "lora.r=8.5": ("lora.r=8.5: must be a whole number",),
    "lora.dropout=1": ("lora.dropout=1: must be below 1",),
    "lora.loraplus_lr_ratio=0.5": ("lora.loraplus_lr_ratio=0.5: must be 1 or more",),
    "lora.target_modules=[]": ("lora.target_modules=[]: lists no layers", "all-linear"),
    "lora.target_modules=all-linear,q_proj": ("lora.target_modules=[all-linear, q_proj]", "cannot be combined"),
    "lora.init=zero": ("lora.init=zero: must be 'default'",),
    "quantization.bits=3": ("quantization.bits=3: must be 4 or 8",),
    "adapter=none ; quantization.bits=8": ("quantization.bits=8: ", "adapter is none", "set adapter: qlora"),
    "adapter=lora ; quantization.bits=8": ("quantization.bits=8: ", "adapter is lora", "set adapter: qlora"),
    "adapter=qlora ; quantization.bits=8": ("quantization.bits=8: quant_type nf4", "use quantization.quant_type"),
    "adapter=qlora ; quantization.bits=4 ; quantization.type=fp8": ("quantization.bits=4: quant_type fp8", "nf4"),
    "adapter=none ; quantization.type=int8": ("quantization.type=int8: ", "adapter is none", "adapter: qlora"),
    "quantization.quant_type=fp8": ("quantization.quant_type=fp8: ", "adapter is lora", "adapter: qlora"),
    "adapter=qlora ; quantization.type=fp8 ; lora.dora=true": ("lora.dora=true: DoRA cannot read", "quant_type: nf4"),
    "adapter=qlora ; quantization.type=int8 ; lora.init=loftq": ("lora.init=loftq: needs a 4-bit base",),
    "training.qat=int2": ("training.qat=int2: must be 'int8' or 'int4'",),
    "training.qat=int8 ; adapter=none": ("training.qat=int8: quantizes weights", "adapter is none; use adapter: lora"),
    "training.qat=int4 ; adapter=qlora": ("training.qat=int4: quantizes merged", "quantized to nf4; use adapter: lora"),
    "training.qat=int8 ; adapter=qlora ; quantization.type=fp8": ("training.qat=int8", "fp8; use adapter: lora"),
    "training.qat=int8 ; lora.dora=true": ("training.qat=int8: quantizes W + s B A, but DoRA", "use lora.dora: false"),
    "training.qat=int4 ; lora.init=pissa": ("int4: quantizes base weights, but lora.init", "use lora.init: default"),
    "training.qat=int4 ; ops.backend=cuda": ("ops.backend=cuda: training.qat=int4 computes", "use ops.backend: auto"),
    "training.qat=int4 ; training.torch_compile=true": ("torch.compile cannot trace", "turn it off"),
    "quantization.block_size=65": ("quantization.block_size=65: must be 32, 64",),
    "training.learning_rate=fast": ("training.learning_rate=fast: must be a number, such as",),
    "training.learning_rate=0": ("training.learning_rate=0: must be above 0",),
    "training.epochs=.inf": ("training.epochs=.inf: must be a finite number",),
    "training.precision=bf17": ("training.precision=bf17: must be 'auto', 'bf16', 'fp16' or 'fp32'",),
    "training.optimizer=sgd": ("training.optimizer=sgd: must be 'adamw', 'adamw_8bit', ",),
    "training.max_steps=0": ("training.max_steps=0: must be 1 or more",),
    "training.memory_fraction=1.5": ("training.memory_fraction=1.5: must be 1 or less",),
    "training.gradient_checkpointing=[1]": ("training.gradient_checkpointing=[1]: must be 'none'",),
    "training.gradient_checkpointing_layers=2": ("gradient_checkpointing=none; use non_reentrant",),
    "training.gradient_checkpointing_layers=0 ; training.gradient_checkpointing=true": (
        "training.gradient_checkpointing_layers=0: must be 1 or more",
    ),
    "training.gradient_checkpointing_layers=2 ; training.gradient_checkpointing=selective": ("use non_reentrant",),
    "training.warmup_steps=20 ; training.max_steps=10": ("must be below training.max_steps=10",),
    "training.early_stopping=3": ("training.early_stopping=3: no data is held out", "dataset.val_split"),
    "training.best_checkpoint=true ; dataset.val_split=0.1": ("training.eval_steps=0", "set it"),
    "training.best_checkpoint=true ; dataset.val_split=0.1 ; training.eval_steps=3": (
        "training.save_steps=500", "multiple of eval_steps=3",
    ),
    "zero.stage=4": ("zero.stage=4: must be auto, 0, 1, 2 or 3",),
    "zero.stage=-1": ("zero.stage=-1: below zero", "write auto"),
    "training.batch_size=-1": ("training.batch_size=-1: below zero", "write auto"),
    "zero.stage=auto ; zero.offload_parameters=true": ("only stage 3 partitions", "zero.stage is auto; use"),
    "zero.offload_optimizer=true ; zero.stage=0": ("zero.offload_optimizer=true: not possible at", "use zero.stage: 1"),
    "zero.offload_parameters=true": ("zero.offload_parameters=true: only stage 3", "zero.stage: 3"),
    "zero.offload_parameters=true ; zero.stage=3 ; zero.gather=module ; adapter=qlora": (
        "cannot offload a quantized base",
        "zero.gather: layer",
        "adapter: lora",
    ),
    "zero.gather=layer": ("zero.gather=layer: only stage 3", "zero.stage is 2", "use zero.stage: 3"),
    "zero.gather=layer ; zero.stage=3 ; adapter=none": ("per-layer gathering needs frozen weights", "use module"),
    "zero.gather=layer ; zero.stage=3 ; lora.dora=true": ("zero.gather=layer: DoRA", "use module"),
    "zero.stage=3 ; zero.gather=module ; lora.init=orthogonal": ("lora.init=orthogonal", "use zero.stage: 2"),
    "training.optimizer=muon": ("training.optimizer=muon: computes with whole matrices", "use zero.stage: 0"),
    "training.optimizer=adafactor ; zero.stage=auto": ("training.optimizer=adafactor", "zero.stage=auto partitions"),
    "training.optimizer=muon ; zero.stage=0 ; lora.dora=true": ("training.optimizer=muon: only trains matrices",),
    "training.optimizer=lion ; zero.offload_optimizer=true": ("training.optimizer=lion: its state must stay",),
    "training.optimizer=schedule_free_adamw": ("training.optimizer=schedule_free_adamw: replaces the schedule",),
    "training.optimizer=schedule_free_adamw ; training.lr_scheduler=constant ; scu.enabled=true": ("before averaging",),
    "training.optimizer=schedule_free_adamw ; training.lr_scheduler=constant ; zero.stage=3 ; zero.gather=module": (
        "averaged weights are not available",
    ),
    "zero.offload_optimizer=true ; training.optimizer=adamw_8bit": ("training.optimizer=adamw_8bit", "turn zero.off"),
    "zero.stage=3 ; lora.init=pissa": ("lora.init=pissa", "zero.stage=3", "use zero.stage: 2"),
    "zero.stage=3 ; zero.gather=module ; model.added_tokens=<x>": ("model.added_tokens", "use zero.stage 0 to 2"),
    "zero.stage=3 ; training.torch_compile=true": ("training.torch_compile=true", "use zero.stage 0 to 2"),
    "adapter=qlora ; lora.init=pissa": ("lora.init=pissa: needs full-precision weights", "use loftq or default"),
    "lora.init=loftq": ("lora.init=loftq", "set adapter: qlora"),
    "lora.init=pissa ; lora.adapter_path=runs/y": ("lora.init=pissa", "remove one"),
    "adapter=none ; lora.adapter_path=runs/y": ("lora.adapter_path=runs/y: ", "adapter is none", "set adapter: lora"),
    "dataset.mix=[{path: b}]": ("dataset.path=data.jsonl", "dataset.mix is also set", "keep one"),
    "dataset.path=null ; dataset.mix=[a.jsonl]": ("dataset.mix.0=a.jsonl: must be a section",),
    "dataset.path=null": ("dataset.path: missing", "such as dataset.path=train.jsonl"),
    "dataset.val_split=0.9": ("dataset.val_split=0.9: must be a fraction of the records up to 0.5",),
    "dataset.val_split=.inf": ("dataset.val_split=.inf: must be a fraction of the records up to 0.5",),
    "dataset.val_split=0.1 ; dataset.evaluation={path: b}": ("dataset.val_split=0.1", "dataset.evaluation", "keep one"),
    "dataset.format=alpacca": ("dataset.format=alpacca: must be 'auto', 'messages'",),
    "dataset.format=custom": ("dataset.format=custom: needs dataset.template",),
    "dataset.train_on=robot": ("dataset.train_on=[robot]: unknown role; choose from assistant",),
    "dataset.train_on=[last,assistant]": ("dataset.train_on=[last, assistant]: assistant and all already", "keep one"),
    "dataset.thinking=empty ; dataset.chat_template_kwargs={enable_thinking: true}": (
        "dataset.thinking=empty: has no effect when dataset.chat_template_kwargs.enable_thinking is true; remove one",
    ),
    "training.focal_gamma=3": ("training.focal_gamma=3: has no effect", "set training.loss: focal"),
    "training.loss=label_smoothing ; training.label_smoothing=1": ("training.label_smoothing=1: must be below 1",),
    "scu.enabled=true ; scu.target=0.01 ; training.loss=dft": ("training.loss=dft: scu.measure=", "use nll, or"),
    "scu.enabled=true ; scu.measure=kl ; scu.reference=a.txt ; training.neftune_noise_alpha=5": (
        "training.neftune_noise_alpha=5: scu.measure: kl would measure the noise",
    ),
    "dataset.streaming=true": ("dataset.streaming=true", "set training.max_steps"),
    "logging.report_to=neptune": ("logging.report_to=[neptune]: unknown tracker; choose from tensorboard",),
    "scu.enabled=true ; scu.target=0.01 ; training.weight_decay=0.1": ("training.weight_decay=0.1", "regularizes"),
    "scu.enabled=true ; scu.target=0.01 ; adapter=none": ("scu.enabled=true: the controller needs", "use lora or"),
    "scu.enabled=true ; scu.lambda_min=5 ; scu.lambda_max=1": ("scu.lambda_min=5: must be below scu.lambda_max=1.0",),
    "scu.enabled=true ; scu.target=0.01 ; scu.lambda_start=99999": ("scu.lambda_start=99999", "scu.lambda_max=10000"),
    "scu.enabled=true ; scu.measure=kl ; scu.reference=a.txt ; scu.target=0": ("scu.target=0: must be above 0",),
    "scu.enabled=true ; scu.measure=kl": ("scu.reference: scu.measure: kl needs reference text", "set it to a file"),
    "scu.enabled=true ; scu.measure=kl ; scu.reference=a.txt ; training.offload_activations=true ; "
    "training.gradient_checkpointing=true": (
        "training.offload_activations=true: not supported with scu.measure: kl",
    ),
    "model.added_tokens=['']": ("model.added_tokens=", "has an empty entry; remove it"),
    "parallel.sequence=0": ("parallel.sequence=0: must be 1 or more",),
    "parallel.sequence=2 ; task=reward": ("task=reward: not supported with parallel.sequence=2", "preference"),
    "parallel.sequence=2 ; task=preference ; preference.share_prompt=true": (
        "parallel.sequence=2: not supported with preference.share_prompt", "set preference.share_prompt: auto",
    ),
    "parallel.sequence=2 ; scu.enabled=true ; scu.measure=kl ; scu.reference=a.txt": (
        "scu.measure=kl: not supported with parallel.sequence=2",
    ),
    "parallel.sequence=2 ; training.torch_compile=true": ("compile=true: not supported with", "parallel.sequence: 1"),
    "parallel.sequence=2 ; model.attn_implementation=eager": ("=eager: not supported with", "use auto"),
    "parallel.sequence=2 ; training.cuda_graphs=on": ("training.cuda_graphs=on: parallel.sequence exchanges",),
    "scu.integral_bound=0": ("scu.integral_bound=0: must be above 0",),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything_in(folder: Path) -> set[str]:
    # A lock of the cache stays when it is released: removing it would let two processes hold "it" at once.
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".lock"}


def refused_line(run: Callable[[], object], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that must end with 2 and write nothing."""
    before = everything_in(folder)
    with pytest.raises(SystemExit) as end:
        sys.exit(run())  # type: ignore[arg-type]
    captured = capsys.readouterr()
    assert end.value.code == 2, captured.err
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.endswith("\n") and captured.err.count("\n") == 1
    assert everything_in(folder) == before
    return captured.err


def train(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Callable[[], int]:
    monkeypatch.setattr(sys, "argv", ["zerolora", "train", *arguments])
    return zerolora


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_configuration(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, fragments = FILES[name]
    if text is not None:
        (folder / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    line = refused_line(train(monkeypatch, "config.yaml"), folder, capsys)
    assert [fragment for fragment in fragments if fragment not in line] == [], line


@pytest.mark.parametrize("overrides", SETTINGS)
def test_a_setting_that_cannot_be(
    overrides: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.yaml").write_text(GOOD)
    line = refused_line(train(monkeypatch, "config.yaml", *overrides.split(" ; ")), folder, capsys)
    assert [fragment for fragment in SETTINGS[overrides] if fragment not in line] == [], line


def test_the_configuration_without_a_mistake_is_accepted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (folder / "config.yaml").write_text(GOOD)
    assert train(monkeypatch, "config.yaml", "--dry-run")() == 0


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, good data, and one of each bad thing."""
    ground = tmp_path_factory.mktemp("ground")
    make_model(ground / "model")
    make_tokenizer(ground / "tokenizer-only")
    write_chats(ground / "good.jsonl", 20)
    (ground / "broken.jsonl").write_text('{"text": "a b"}\n{"text": "c d"\n{"text": "e f"}\n')
    (ground / "empty.jsonl").write_text("")
    (ground / "wrong.jsonl").write_text('{"question": "a", "reply": "b"}\n' * 4)
    (ground / "robot.jsonl").write_text('{"messages": [{"role": "robot", "content": "a"}]}\n' * 4)
    (ground / "users.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 4)
    (ground / "few.jsonl").write_text((ground / "good.jsonl").read_text() + (ground / "users.jsonl").read_text() * 90)
    (ground / "notes.odt").write_text("x")
    (ground / "no-data").mkdir()
    (ground / "cache").mkdir()
    (ground / "gone").symlink_to("nowhere-at-all")
    (ground / "run").mkdir()
    (ground / "run" / "adapter_config.json").write_text("{}")
    (ground / "half" / "checkpoint-5").mkdir(parents=True)
    (ground / "half" / "checkpoint-5" / "state.json").write_text("{}")
    for name, content in (
        ("cut-adapter", b"\x10\0\0\0\0\0\0\0{}"),
        ("old-adapter", b"PK\x03\x04" + bytes(60)),
        ("nan-adapter", save({"q_proj.lora_A.weight": torch.tensor([[torch.nan]], dtype=torch.bfloat16)})),
        ("int-adapter", save({"q_proj.lora_A.weight": torch.tensor([[1]], dtype=torch.int8)})),
    ):
        (ground / name).mkdir()
        (ground / name / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
        (ground / name / "adapter_model.safetensors").write_bytes(content)
    make_model(ground / "odd-padding")
    settings = (ground / "odd-padding" / "config.json").read_text()
    (ground / "odd-padding" / "config.json").write_text(settings.replace('"pad_token_id": 0', '"pad_token_id": 999'))
    (ground / "pickled").mkdir()
    (ground / "pickled" / "config.json").write_bytes((ground / "model" / "config.json").read_bytes())
    (ground / "pickled" / "pytorch_model.bin").write_text("x")
    (ground / "pickled-adapter").mkdir()
    shutil.copy(ground / "cut-adapter" / "adapter_config.json", ground / "pickled-adapter")
    (ground / "config.yaml").write_text(
        "base_model: model\noutput_dir: out\ndataset: {path: good.jsonl, max_length: 64, cache_dir: cache}\n"
    )
    return ground


# overrides, separated by ` ; `: what the line must hold
CONTENT: dict[str, tuple[str, ...]] = {
    "base_model=./nowhere": ("base_model=./nowhere: ",),
    "base_model=modle": ("base_model=modle: not a local folder (did you mean model?), not in the Hub's cache",),
    "model.tokenizer=model/config.json": ("model.tokenizer=model/config.json: is a file; use the folder with tokeni",),
    "dataset.cache_dir=model/cache": ("dataset.cache_dir=model/cache: is inside base_model (model); use a folder",),
    "--world-size=7 ; training.global_batch_size=8": (
        "training.global_batch_size=8: cannot be divided evenly among 7",
    ),
    "dataset.evaluation={path: users.jsonl}": ("none of the 4 records of dataset.evaluation.path=users.jsonl",),
    "dataset.path=few.jsonl ; dataset.val_split=1": (
        "none of the 1 records of dataset.path=few.jsonl held out by dataset.val_split=1 has a token",
    ),
    "base_model=no-data": ("base_model=no-data: has no config.json",),
    "base_model=model/model.safetensors": ("base_model=model/model.safetensors: is a file; use the folder",),
    "base_model=odd-padding": ("base_model=odd-padding: config.json: pad_token_id=999: must be",),
    "base_model=pickled": ("base_model=pickled: has no .safetensors file", "convert"),
    "lora.adapter_path=./pickled-adapter": (
        "lora.adapter_path=./pickled-adapter: adapter_model.safetensors is missing",
    ),
    "zero.extra.zero_optimization.sub_group_size=x": (
        "zero.extra: DeepSpeed rejects sub_group_size=x: must be a whole number",
    ),
    "zero.extra.zero_optimization.shard_it=1": ("zero.extra: DeepSpeed rejects shard_it=1",),
    "zero.extra.flops_profiler=5": ("zero.extra={flops_profiler: 5}: DeepSpeed rejects it",),
    "training.precision=fp16": ("training.precision=fp16: needs a GPU", "use auto, bf16 or fp32"),
    "model.attn_implementation=flash_attention_2": ("flash_attention_2: the package flash-attn is not installed",),
    "adapter=qlora ; lora.init=loftq": ("lora.init=loftq: needs a GPU",),
    "ops.backend=cuda": ("ops.backend=cuda: needs a GPU",),
    "model.attn_implementation=flex_attention": ("flex_attention: needs a GPU",),
    "model.tokenizer=no-data": ("model.tokenizer=no-data: ",),
    "model.pad_token=<none-such>": ("model.pad_token=<none-such>: not in the vocabulary", "model.added_tokens"),
    "lora.init=orthogonal ; lora.r=5": (
        "lora.init=orthogonal: model.layers.0.",
        "needs an even rank, not 5; set lora.r",
    ),
    "lora.init=orthogonal ; lora.rank_pattern={q_proj: 3}": ("self_attn.q_proj needs an even rank, not 3",),
    "lora.init=pissa ; lora.r=64": ("lora.init=pissa: model.layers.0.self_attn.", "a rank of at most 32, not 64"),
    "lora.init=olora ; lora.rank_pattern={k_proj: 33}": ("self_attn.k_proj needs a rank of at most 32, not 33",),
    "base_model=. ; output_dir=new": ("base_model=.: has no config.json",),
    "lora.adapter_path=. ; output_dir=new": ("lora.adapter_path=.: has no adapter_config.json",),
    "lora.target_modules=q_project": ("lora.target_modules=", "q_project", "q_proj"),
    "parallel.sequence=3": ("parallel.sequence=3: LlamaForCausalLM has 4 attention heads", "use a divisor of"),
    "--world-size=3 ; parallel.sequence=2": ("parallel.sequence=2: does not divide the 3 ranks", "use 1 or 3"),
    "lora.modules_to_save=head": ("lora.modules_to_save=head", "lm_head"),
    "lora.adapter_path=./cut-adapter": ("./cut-adapter: adapter_model.safetensors is truncated or damaged",),
    "lora.adapter_path=./nan-adapter": ("./nan-adapter: q_proj.lora_A.weight contains NaN or infinity; use an",),
    "lora.adapter_path=./int-adapter": ("./int-adapter: q_proj.lora_A.weight is int8; use a 16-bit or fp32 adapter",),
    "lora.adapter_path=./old-adapter": ("./old-adapter: adapter_model.safetensors is not", "pickled"),
    "lora.r=500": ("lora.r=500: no adapted layer of this model is wider than 64", "use 64 or less"),
    "lora.r=65 ; lora.target_modules=k_proj": ("no adapted layer of this model is wider than 32",),
    "output_dir=gone/run": ("output_dir=gone/run: gone is a symlink to nowhere-at-all, which does not exist",),
    "lora.adapter_path=./no-data": ("lora.adapter_path=./no-data: has no adapter_config.json",),
    "output_dir=run": ("output_dir=run: contains files not written by a run (adapter_config.json)", "use a new folder"),
    "output_dir=model": ("output_dir=model: is also base_model", "use a separate folder"),
    "output_dir=model ; output.overwrite=true": ("output_dir=model: is also base_model",),
    "output_dir=. ; output.overwrite=delete": ("output_dir=.: contains base_model (model)",),
    "output_dir=. ; training.resume_from_checkpoint=auto": ("output_dir=.: contains base_model (model)",),
    "output_dir=good.jsonl": ("output_dir=good.jsonl: good.jsonl is a file", "use another folder"),
    "output_dir=good.jsonl/x": ("output_dir=good.jsonl/x: good.jsonl is a file",),
    "training.resume_from_checkpoint=latest": ("resume_from_checkpoint=latest: no complete checkpoint in out",),
    "training.resume_from_checkpoint=no-data": ("resume_from_checkpoint=no-data: is not a checkpoint folder",),
    "training.resume_from_checkpoint=half/checkpoint-5": ("half/checkpoint-5: is incomplete",),
    "dataset.path=nothing.jsonl": ("dataset.path=nothing.jsonl: no such file",),
    "dataset.path=no-data": ("dataset.path=no-data: the folder has no data files",),
    "dataset.path=notes.odt": ("dataset.path=notes.odt",),
    "dataset.path=empty.jsonl": ("dataset.path=empty.jsonl: has no records",),
    "dataset.path=broken.jsonl": ("dataset.path=broken.jsonl", "line 2", "JSON"),
    "dataset.path=wrong.jsonl": ("question", "reply", "dataset.fields"),
    "dataset.path=wrong.jsonl ; dataset.format=alpaca": (
        "dataset.format=alpaca: the records have question, reply, but no instruction",
    ),
    "dataset.path=robot.jsonl": ("robot", "unknown role 'robot'"),
    "dataset.path=users.jsonl": ("dataset.train_on=assistant: none of the 4 records of dataset.path=users.jsonl",),
    "dataset.fields={prompt: messages}": ("the records have messages", "set dataset.fields"),
    "dataset.fields={messages: talk}": ("dataset.fields.messages=talk: no such field", "messages"),
    "dataset.thinking=empty": ("dataset.thinking=empty: the chat template has no enable_thinking variable; use strip",),
    "dataset.chat_template=template.jinja": ("dataset.chat_template=template.jinja",),
    "training.gradient_checkpointing_layers=9 ; training.gradient_checkpointing=true": (
        "training.gradient_checkpointing_layers=9: the model has only 2 layers; remove the setting to recompute all",
    ),
    "dataset.cache_dir=/proc/none": ("dataset.cache_dir=/proc/none: cannot be written",),
    "dataset.evaluation={path: nothing.jsonl}": ("dataset.evaluation.path=nothing.jsonl: no such file",),
}


@pytest.mark.parametrize("overrides", CONTENT)
def test_content_that_cannot_be_trained_on(
    overrides: str, ground: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from trainer.commands.prepare_run import main as prepare

    if any(name in overrides for name in ("loftq", "fp16", "cuda", "flex_attention")) and torch.cuda.is_available():
        pytest.skip("with a GPU this setting is fine")
    monkeypatch.chdir(ground)
    line = refused_line(lambda: prepare(["config.yaml", *overrides.split(" ; ")]), ground, capsys)
    assert [fragment for fragment in CONTENT[overrides] if fragment not in line] == [], line


def test_a_full_disk_is_noticed_before_training(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.commands.prepare_run import main as prepare

    full = tmp_path / "full"
    full.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(full)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        monkeypatch.chdir(ground)
        line = refused_line(lambda: prepare(["config.yaml", f"output_dir={full}/run"]), full, capsys)
    finally:
        subprocess.run(["umount", str(full)], check=True)
    assert f"output_dir={full}/run: 0.00 GiB free" in line and "free some space" in line


def test_train_reports_the_mistakes_of_the_checks(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    before = everything_in(ground)
    command = [sys.executable, "-m", "launcher.cli", "train", "config.yaml", "dataset.path=broken.jsonl"]
    result = subprocess.run(command, cwd=ground, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert result.stderr.startswith("error: dataset.path=broken.jsonl") and result.stderr.count("\n") == 1
    assert result.stdout.splitlines()[1] == "checking the model model" and everything_in(ground) == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("trainer.commands.estimate", []),
        ("trainer.commands.validate", ["--colour"]),
        ("trainer.commands.prepare_run", ["c.yaml", "--world-size", "0"]),
        ("benchmarks.bench.__main__", ["--steps", "many"]),
        ("benchmarks.tiers.__main__", ["quick", "--json", "x", "--nope"]),
        ("trainer.commands.export.__main__", ["run", "--format", "onnx"]),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    module = importlib.import_module(command)
    with pytest.raises(SystemExit) as ended:
        module.main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "see `" in line and "--help`" in line


def test_a_tilde_in_a_path_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    parser = CommandParser(prog="zerolora merge")
    parser.add_argument("run")
    parser.add_argument("--output")
    parser.add_argument("--system")
    found = parser.parse_intermixed_args(["~/run", "--output=~/merged", "--system=~/text"])
    assert vars(found) == {"run": "/home/me/run", "output": "/home/me/merged", "system": "~/text"}


@pytest.mark.parametrize("word", ["0", "-1", "1.5", "many"])
def test_an_argument_that_counts_takes_whole_numbers_from_1(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="zerolora inspect")
    parser.add_argument("--step", type=parse_positive_int)
    assert parser.parse_args(["--step", "1"]).step == 1
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([f"--step={word}"])
    assert ended.value.code == 2
    assert f"error: --step={word}: must be a whole number, 1 or more" in capsys.readouterr().err
