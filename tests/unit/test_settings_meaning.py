"""Settings mean what they say: YAML 1.2, text on the command line, other trainers' values, paths, bounds."""

from pathlib import Path
from typing import Any

import pytest

from trainer.config import RunConfig, UserError, dump_yaml, load_config
from trainer.config.aliases import REPLACEMENT_ADVICE

BASE = "base_model: some/model\noutput_dir: runs/x\ndataset: {path: data.jsonl}\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data/mine")
    monkeypatch.delenv("NOT_SET", raising=False)
    path = Path("c.yaml")
    path.write_text(BASE)
    return path


def value_of(config: RunConfig, dotted: str) -> Any:
    value: Any = config
    for name in dotted.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        load_config(file, overrides)
    return str(refused.value)


# An override, and what the setting then is.
READ_AS: list[tuple[str, Any]] = [
    # text is taken as it stands
    ("logging.run_name=trial #3", "trial #3"),
    ("logging.run_name=010", "010"),
    ("logging.run_name=true", "true"),
    ("logging.run_name=1e-4", "1e-4"),
    ("logging.run_name='quoted #1'", "quoted #1"),
    ("logging.run_name='a' and 'b'", "'a' and 'b'"),
    ("logging.run_name='a' # 'b'", "'a' # 'b'"),
    ("logging.run_name=[draft", "[draft"),
    ("logging.run_name=*star", "*star"),
    ("logging.run_name=2026-09-09", "2026-09-09"),
    ("run_name=x=y", "x=y"),
    ("logging.run_name=<<", "<<"),
    ("dataset.system_prompt=You are the #1: {answer} [briefly]", "You are the #1: {answer} [briefly]"),
    ("dataset.system_prompt=You are: helpful", "You are: helpful"),
    ("dataset.system_prompt=line\nline # two", "line\nline # two"),
    ("dataset.system_prompt=", None),
    ("dataset.system_prompt=''", ""),
    ("dataset.chat_template={% for m in messages %}{{ m }}{% endfor %}", "{% for m in messages %}{{ m }}{% endfor %}"),
    ("dataset.fields.prompt=question #2", "question #2"),
    ("logging.sample_prompts=What is #1, and why?", ("What is #1, and why?",)),
    ("logging.sample_prompts=['a, b', c]", ("a, b", "c")),
    ("lora.target_modules=q_proj,v_proj", ("q_proj", "v_proj")),
    # numbers are those of YAML 1.2
    ("training.batch_size=010", 10),
    ("training.batch_size=0x10", 16),
    ("training.max_steps=1e3", 1000),
    ("training.max_steps=1_000", 1000),
    ('training.max_steps="12"', 12),
    ("training.learning_rate=1e-4", 1e-4),
    ("training.learning_rate=.0002", 0.0002),
    ("zero.stage=\"2\"", 2),
    ("zero.stage='auto'", -1),
    ("training.warmup_ratio=0.01", 0.01),
    # nothing, in every way of writing it
    ("training.max_steps=None", None),
    ("training.max_steps=null", None),
    ("training.max_steps=~", None),
    ("training.save_total_limit=none", None),
    ("lora.adapter_path=None", None),
    ("resume_from_checkpoint=null", None),
    # words may be typed in capitals
    ("training.precision=BF16", "bf16"),
    ("training.lr_scheduler=Cosine", "cosine"),
    ("training.batch_size=AUTO", -1),
    ("lora.target_modules=ALL-LINEAR", ("all-linear",)),
    ("lora.target_modules=q_proj, v_proj,", ("q_proj", "v_proj")),
    # words that are truth values elsewhere
    ("logging.progress=off", "off"),
    ("training.gradient_checkpointing=on", "non_reentrant"),
    ("training.resume_from_checkpoint=true", "latest"),
    ("training.resume_from_checkpoint=false", None),
    ("resume=true", "latest"),
    # other trainers' names
    ("lora_target=all", ("all-linear",)),
    ("new_special_tokens=<a>,<b>", ("<a>", "<b>")),
    ("neftune_noise_alpha=5", 5.0),
    ("saves_per_epoch=2", 2.0),
    # paths
    ("output_dir=~/runs/x", "/home/me/runs/x"),
    ("output_dir=${DATA}/runs", "/data/mine/runs"),
    ("base_model=$DATA/model", "/data/mine/model"),
    ("base_model=~/model", "/home/me/model"),
    ("dataset.path=~/a.jsonl", "/home/me/a.jsonl"),
    ("dataset.cache_dir=$DATA/cache", "/data/mine/cache"),
    ("lora.adapter_path=~/runs/y", "/home/me/runs/y"),
    ("model.tokenizer=~/tokenizer", "/home/me/tokenizer"),
    ("training.resume_from_checkpoint=~/runs/y/checkpoint-5", "/home/me/runs/y/checkpoint-5"),
    ("dataset.chat_template=~/chat.jinja", "/home/me/chat.jinja"),
    ("dataset.path=cost$5.jsonl", "cost$5.jsonl"),
]  # fmt: skip
SETTING_OF = {
    "run_name": "logging.run_name",
    "resume": "training.resume_from_checkpoint",
    "resume_from_checkpoint": "training.resume_from_checkpoint",
    "lora_target": "lora.target_modules",
    "new_special_tokens": "model.added_tokens",
    "neftune_noise_alpha": "training.neftune_noise_alpha",
    "saves_per_epoch": "training.saves_per_epoch",
}


@pytest.mark.parametrize(("override", "value"), READ_AS, ids=[override for override, _ in READ_AS])
def test_an_override_is_read_as(override: str, value: Any, file: Path) -> None:
    name = override.partition("=")[0]
    config = load_config(file, [override]).config
    found = value_of(config, SETTING_OF.get(name, name))
    assert (type(found), found) == (type(value), value)
    Path("again.yaml").write_text(dump_yaml(config))
    assert load_config("again.yaml").config == config, "what is printed is read as the same"


# Lines of a file, and what one of the settings then is.
IN_A_FILE: list[tuple[str, str, Any]] = [
    ("training: {batch_size: 010}", "training.batch_size", 10),
    ("logging: {run_name: 1:30}", "logging.run_name", "1:30"),
    ("logging: {run_name: 2026-09-09}", "logging.run_name", "2026-09-09"),
    ("logging: {run_name: yes}", "logging.run_name", "yes"),
    ("training: {learning_rate: 1e-4}", "training.learning_rate", 1e-4),
    ("training: {max_steps: 1e3}", "training.max_steps", 1000),
    ("training: {max_steps: 1_000}", "training.max_steps", 1000),
    ("training: {max_steps: None}", "training.max_steps", None),
    ("wandb_project:", "logging.project", "zerolora"),
    ("seed:", "seed", 42),
    ("adapter: qlora\nquantization: {bits: 8, type: fp8}", "quantization.quant_type", "fp8"),
    ("adapter: qlora\nquantization: {quant_type: int8}", "quantization.bits", 8),
    ("a: &a {epochs: 3}\n", "", None),
    ("training: {<<: {epochs: 3}, batch_size: 2}", "training.epochs", 3.0),
]


@pytest.mark.parametrize(("text", "name", "value"), IN_A_FILE, ids=[text for text, *_ in IN_A_FILE])
def test_a_file_is_read_as(text: str, name: str, value: Any, file: Path) -> None:
    file.write_text(BASE + text + "\n")
    if not name:
        assert "a: unknown setting" in refusal(file)
        return
    found = value_of(load_config(file).config, name)
    assert (type(found), found) == (type(value), value)


REFUSED: dict[str, tuple[str, ...]] = {
    "training.max_steps=1:30": ("training.max_steps=1:30: must be a whole number",),
    "training.batch_size=true": ("training.batch_size=true: must be a whole number",),
    "training.learning_rate=true": ("training.learning_rate=true: must be a number",),
    "zero.stage=true": ("zero.stage=true: must be a whole number",),
    "training.max_steps=3 # or 4": ("training.max_steps=3 # or 4: must be a whole number",),
    "training.max_steps=1_00": ("training.max_steps=1_00: must be a whole number",),
    "dataset.packing=yes": ("dataset.packing=yes: must be true or false, not a string; write true",),
    "dataset.shuffle=off": ("write false",),
    "dataset.packing=1": ("dataset.packing=1: must be true or false; write true",),
    "zero={stage: 3": ("zero={stage: 3: not valid YAML",),
    "dataset.fields={prompt: a #b}": ("not valid YAML", "quote # and :"),
    ".training.epochs=3": (".training.epochs has an extra dot; write training.epochs=...",),
    "training..epochs=3": ("write training.epochs=",),
    "--training.epochs=3": ("write training.epochs=3",),
    "output_dir=$NOT_SET/x": ("output_dir=$NOT_SET/x: the variable NOT_SET is not set; export it",),
    "dataset.path=~nobody_at_all/x": ("dataset.path=~nobody_at_all/x: home folder of ~nobody_at_all not found",),
    "load_in_8bit=maybe": ("load_in_8bit=maybe: not a zerolora setting; write `adapter: qlora`",),
    "quantization_bit=3": ("quantization_bit=3: not a zerolora setting; write `adapter: qlora`",),
    "stage=ppo": ("stage=ppo: not a zerolora setting; write `task: preference`",),
    "lora_target_linear=maybe": (
        "lora_target_linear=maybe: not a zerolora setting; write `lora.target_modules: all-linear`",
    ),
    "ddp_timeout=600": ("ddp_timeout=600: not a zerolora setting; write `training.timeout_minutes`",),
    "train_on_eos=last": (
        "train_on_eos=last: not a zerolora setting; remove it; end-of-turn tokens are trained on in trained turns",
    ),
    "eval_strategy=epoch": ("write `training.eval_steps` or `training.evals_per_epoch`",),
    "loss_type=dpo": ("loss_type=dpo: not a zerolora setting; write `training.loss: nll` or `dft`",),
    "label_smoothing_factor=0.1": ("write `training.loss: label_smoothing`",),
    "assistant_only_loss=false": ("write `dataset.train_on",),
    "training.best_checkpoint=<<": ("must be true or false",),
    "rl=grpo": ("rl=grpo: not a zerolora setting", "online methods are not supported"),
    "template=llama3": ("template=llama3: not a zerolora setting", "dataset.chat_template"),
    "eot_tokens=[x]": ("remove it; the chat template determines the end of a turn",),
    "tokenizer_type=AutoTokenizer": ("remove it",),
    "dataset.fields={prompt:ticket}": ("needs a space after the colon; write {prompt: ticket}",),
    "dataset.roles={user:me}": ("needs a space after the colon; write {user: me}",),
    "val_set_size=200.5": ("val_set_size=200.5: must be a fraction of the records up to 0.5", "whole number"),
    "logging.report_to=[tensorboard, none]": ("logging.report_to=[tensorboard, none]: none cannot be combined",),
    "lora_r=0": ("lora_r=0: must be 1 or more",),
    "training.global_batch_size=auto ; gradient_accumulation_steps=4": (
        "gradient_accumulation_steps=4: training.global_batch_size=auto already determines it; remove one",
    ),
    "training.global_batch_size=32 ; gradient_accumulation_steps=3": (
        "training.global_batch_size=32 already determines it",
    ),
    "training.global_batch_size=0": ("training.global_batch_size=0: must be 1 or more",),
    # DeepSpeed's own keys
    "zero.extra={zero_optimization: {stage: 3}}": (
        "zero.extra.zero_optimization.stage=3: has its own setting; use zero.stage",
    ),
    "zero.extra={zero_optimization: hello}": ("zero.extra.zero_optimization=hello: must be a mapping", "zero.stage"),
    "zero.extra.zero_optimization.offload_param={device: cpu}": ("has its own setting; use zero.offload_parameters",),
    "zero.extra.zero_optimization.stage3_max_live_parameters=1": ("has its own setting; use zero.max_live_parameters",),
    "zero.extra.train_micro_batch_size_per_gpu=4": ("has its own setting; use training.batch_size",),
    "zero.extra.gradient_clipping=1": ("has its own setting; use training.max_grad_norm",),
    "zero.extra.fp16={enabled: true}": (
        "zero.extra.fp16={enabled: true}: has its own setting; use training.precision",
    ),
    "zero.extra.optimizer.type=Lion": ("has its own setting; use training.optimizer",),
    "zero.extra.zero_allow_untested_optimizer=false": ("is set by zerolora and cannot be changed; remove it",),
    "zero.extra.sparse_attention={}": ("is a DeepSpeed feature that zerolora does not support",),
    "zero.extra=5": ("zero.extra=5: must be a mapping",),
    "dataset.fields={prompt: 5}": ("dataset.fields.prompt=5: must be a string; put it in quotes",),
    "dataset.mix=a.jsonl": ("dataset.mix=a.jsonl: must be a list of sections, such as [{path: ...}]",),
    "dataset={path: [a, b]}": ("dataset.path=[a, b]: must be a string, not a list; use dataset.mix for",),
    "dataset={path: x, system_prompt: {You are: helpful}}": (
        "dataset.system_prompt={You are: helpful}: must be a string, not a mapping; write one value, or quote it",
    ),
    "lora.lora_r=8": ("did you mean lora.r?",),
    "lora.sequence_len=8": ("did you mean dataset.max_length?",),
    "rank=8": ("did you mean lora.r?",),
    "training.bf16=true": ("training.bf16: not a zerolora setting; write `training.precision: bf16`",),
    "training.min_lr=1e-5": ("training.min_lr: not a zerolora setting; write", "`training.min_lr_ratio`"),
    "training.stage=3": ("training.stage: unknown setting; did you mean zero.stage?",),
    "training.lora={r: 4}": ("training.lora: unknown setting; did you mean lora?",),
    "training.max_steps=-1": ("training.max_steps=-1: must be 1 or more; remove it",),
    "training.max_steps ; = ; 5": ("training.max_steps: not an override; write training.max_steps=VALUE",),
    "+training.epochs=5": ("+training.epochs=5: begins with +; write training.epochs=5",),
    "dataset.mix=[{path: a}] ; dataset.mix.0.weight=2": ("mix is [{path: a}], not a section; set the whole list",),
    "lora.target_modules=*_proj": ("nothing to repeat at position 0); write .*_proj",),
    "adapters={low: {lora_r: 4}}": ("must be a list of mappings, such as [{name: a}, {name: b}]",),
    "adapters=[{name: 1}]": ('adapters.0.name=1: must name the adapter; write it in quotes: "1"',),
    "task=preference ; preference.loss=sigmoid": ("sigmoid is not a loss; write dpo",),
    "dataset.val_split=9 ; evaluation.metrics=[f.py:loss]": (
        "evaluation.metrics=f.py:loss: another metric is also named loss; rename the function",
    ),
    "dataset.val_split=9 ; evaluation.metrics=[f.py:a, g.py:b, g.py:a]": ("f.py:a: another metric is also named a",),
    "adapter=None": ("adapter=None: must be 'lora', 'qlora' or 'none'",),
    "training.batch_size=none": ("training.batch_size=none: must be a whole number, or auto",),
    "training.deterministic=T": ("training.deterministic=T: must be true or false",),
    "dataset.path=${DATA": ("write variables as ${NAME}",),
    # bounds
    "lora.r=100000": ("lora.r=100000: must be 32768 or less",),
    "training.max_steps=1e30": ("training.max_steps=1e30: must be a whole number with fewer digits",),
    "training.epochs=1e9": ("training.epochs=1e9: must be 100000 or less",),
    "training.batch_size=1000000": ("training.batch_size=1000000: must be 65536 or less",),
    "training.learning_rate=1e6": ("training.learning_rate=1e6: must be 1 or less",),
    "training.learning_rate=.nan": ("training.learning_rate=.nan: must be a finite number",),
    "training.learning_rate=-1e-4": ("training.learning_rate=-1e-4: must be above 0",),
    "training.max_steps=.inf": ("training.max_steps=.inf: must be a finite number",),
    "training.weight_decay=-1": ("training.weight_decay=-1: must be 0 or more",),
    "seed=99999999999": ("seed=99999999999: must be below 4294967296",),
    "scu.tokens=1e300": ("scu.tokens=1e300: must be",),
    "zero.reduce_bucket_size=1e15": ("zero.reduce_bucket_size=1e15: must be 100000000000 or less",),
    "dataset.max_length=100000000": ("dataset.max_length=100000000: must be 16777216 or less",),
    "output_dir=a\x1b[31mb": ("output_dir=", "has a control character ('\\x1b')"),
    f"output_dir={'x' * 300}": ("has a name of 300 bytes, but file systems allow 255",),
    f"dataset.path=a/{'é' * 200}.jsonl": ("a name of 406 bytes",),
    f"base_model={'m' * 5000}": ("a name of 5000 bytes",),
    f"output_dir={'a/' * 3000}": ("has 6000 bytes, but file systems allow 4095",),
    # what looks like a number or text and is none
    "training.learning_rate=._1": ("training.learning_rate=._1: must be a number, such as 1000 or 1e3",),
    "adapter=[\x1b": ("adapter=[: not valid YAML",),
    "logging.run_name=caf\udce9": ("logging.run_name=caf\\udce9': not valid UTF-8",),
    "dataset.system_prompt=caf\udce9": ("dataset.system_prompt=caf\\udce9': not valid UTF-8",),
    "output_dir=caf\udce9": ("output_dir=caf\\udce9': not valid UTF-8",),
    "caf\udce9=1": ("'caf\\udce9=1': not valid UTF-8",),
    f"training.max_steps={'9' * 5000}": ("must be a whole number",),
}


@pytest.mark.parametrize("overrides", REFUSED, ids=[name[:60] for name in REFUSED])
def test_an_override_is_refused(overrides: str, file: Path) -> None:
    line = refusal(file, *overrides.split(" ; "))
    assert [fragment for fragment in REFUSED[overrides] if fragment not in line] == [], line
    assert "\n" not in line and len(line) < 400


def test_a_setting_of_another_trainer_without_a_value_is_ignored_with_a_note(file: Path) -> None:
    file.write_text(BASE + "deepspeed:\nwandb_project:\n")
    assert load_config(file).notes == ("deepspeed: empty, ignored", "wandb_project: empty, ignored")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.eval_steps=0.25"], {"evals_per_epoch": 4.0, "eval_steps": 0}),
        (["training.eval_steps=0.1", "training.epochs=2"], {"evals_per_epoch": 5.0}),
        (["training.eval_steps=0.25", "training.max_steps=10"], {"evals_per_epoch": None, "eval_steps": 3}),
        (["training.save_steps=0.5"], {"saves_per_epoch": 2.0}),
    ],
)
def test_steps_below_one_are_a_fraction_of_the_run(overrides: list[str], expected: dict[str, Any], file: Path) -> None:
    training = load_config(file, ["dataset.val_split=0.1", *overrides]).config.training
    assert {name: getattr(training, name) for name in expected} == pytest.approx(expected)


def test_a_switch_in_place_of_a_number_is_answered_with_its_meaning(file: Path) -> None:
    line = refusal(file, "training.early_stopping=true")
    assert "training.early_stopping=true: must be a whole number" in line and "consecutive evaluations" in line


@pytest.mark.parametrize(("name", "word"), [("output.overwrite", "delete"), ("scu.reference_cache", "auto")])
def test_a_switch_with_further_values_names_them(name: str, word: str, file: Path) -> None:
    for value in ("maybe", "[1]", "3"):
        line = refusal(file, f"{name}={value}")
        assert "must be true, false or " in line and word in line


def test_every_mistake_is_reported_with_its_line(file: Path) -> None:
    file.write_text(BASE + "lora_r: 0\ntraining:\n  epochs: -1\n  lerning_rate: 1\n")
    assert refusal(file, "zero.stage=7").split("\nerror: ") == [
        "lora_r=0: must be 1 or more (c.yaml:4)",
        "training.epochs=-1: must be above 0 (c.yaml:6)",
        "training.lerning_rate: unknown setting; did you mean training.learning_rate? (c.yaml:7)",
        "zero.stage=7: must be auto, 0, 1, 2 or 3 (command line)",
    ]


def test_mistakes_are_reported_together_in_file_order(file: Path) -> None:
    file.write_text(
        "base_modle: m\noutput_dir: runs/x\ndataset: {path: d, formatt: alpaca}\nlora:\n  r: 8\n  r: 9\n"
        "training:\n  epochs: many\n  early_stopping: 2\nlora_alpha: 1\nlora.alpha: 2\ndeepspeed: z.json\n"
        "zero:\n  stage: 0\n  offload_optimizer: true\n  extra: {amp: {}, optimizer: {}}\n"
    )
    assert refusal(file, "lora.dropout", "seed=-1", "training.warmup_steps=9", "max_steps=3").split("\nerror: ") == [
        "base_modle: unknown setting; did you mean base_model? (c.yaml:1)",
        "dataset.formatt: unknown setting; did you mean dataset.format? (c.yaml:3)",
        "r: duplicate (line 6, first in line 5); keep one",
        "training.epochs=many: must be a number, such as 2 or 1e-4 (c.yaml:8)",
        "training.early_stopping=2: no data is held out for evaluation; set dataset.val_split or dataset.evaluation, "
        "and training.eval_steps (c.yaml:9)",
        "lora.alpha: also given as lora_alpha, which is the same setting; keep one (c.yaml:11)",
        "deepspeed=z.json: not a zerolora setting; use the `zero` settings, or `zero.extra` for other keys of "
        "DeepSpeed's configuration (c.yaml:12)",
        "zero.offload_optimizer=true: not possible at zero.stage=0; use zero.stage: 1, 2 or 3 (c.yaml:15)",
        "zero.extra.amp={}: has its own setting; use training.precision instead (c.yaml:16)",
        "zero.extra.optimizer={}: has its own setting; use training.optimizer instead (c.yaml:16)",
        "lora.dropout: not an override; write lora.dropout=VALUE",
        "seed=-1: must be 0 or more (command line)",
        "training.warmup_steps=9: must be below training.max_steps=3, so that the learning rate reaches its peak "
        "(command line)",
    ]


def test_consequences_of_a_mistake_are_not_reported(file: Path) -> None:
    file.write_text(BASE.replace("data.jsonl}", "d, val_splitt: 0.1}") + "training: {eval_steps: 5}\nadapter: qlorra\n")
    assert refusal(file, "lora.init=loftq").split("\nerror: ") == [
        "dataset.val_splitt: unknown setting; did you mean dataset.val_split? (c.yaml:3)",
        "adapter=qlorra: must be 'lora', 'qlora' or 'none' (c.yaml:5)",
    ]


FILES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "brackets": (b"[" * 10_000, ("not valid YAML: nested too deeply",)),
    "billion laughs": (
        b"a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + b"".join(b"%c: &%c [%s]\n" % (i, i, b",".join([b"*%c" % (i - 1)] * 10)) for i in range(98, 108)),
        ("more than 100,000 values",),
    ),
    "anchor in itself": (b"a: &a [*a]\n", ("line 1: an alias refers to an anchor that contains it",)),
    "latin-1": (BASE.encode() + b"logging: {run_name: caf\xe9}\n", ("line 4: byte 0xe9 is not UTF-8", "in UTF-8")),
    "utf-16": (BASE.encode("utf-16"), ("is not UTF-8", "in UTF-8")),
    "binary": (b"\x00\x01\x02safetensors", ("line 1: character '\\x00' is not allowed", "is a YAML file")),
    "huge": (b"# " + b"x" * 9_000_000, ("is larger than 8,388,608 bytes",)),
    "a colon in text": (BASE.encode() + b"adapter: a: b\n", ("line 4", "put text with a colon in quotes")),
    "two documents": (BASE.encode() + b"---\nseed: 1\n", ("not valid YAML at line 4", "one configuration per file")),
    "a name for data": (BASE.replace("{path: data.jsonl}", "identity").encode() + b"cutoff_len: 9\n",
                        ("dataset=identity: must be a section", "nest `path:` under it (c.yaml:3)")),
    "a tag that does not fit": (BASE.encode() + b"seed: !!bool x\n", ("not valid YAML", "a tag that does not match")),
    "tabs": (BASE.encode() + b"training:\n\tepochs: 2\n", ("not valid YAML at line 5", "indent with spaces, not tabs")),
    "two models": (
        BASE.replace("some/model", "[a, b]").encode(),
        ("base_model=[a, b]: must be a string, not a list; write one value, or quote it (c.yaml:1)",),
    ),
    "TOML": (b'base_model = "m"\n[training]\n', ("is a single value; write `name: value`, not `name = value`",)),
    "no-break spaces": (
        BASE.encode() + "training:\n\u00a0\u00a0epochs: 2\n".encode(),
        ("epochs: indented with no-break spaces; indent with spaces (c.yaml:5)",),
    ),
    "no adapter": (BASE.encode() + b"adapter:\n", ("adapter: empty; write a value", "c.yaml:4")),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused(name: str, file: Path) -> None:
    content, fragments = FILES[name]
    file.write_bytes(content)
    line = refusal(file)
    assert [fragment for fragment in fragments if fragment not in line] == [], line
    assert "\n" not in line and len(line) < 300


def test_a_byte_order_mark_is_no_mistake(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert load_config(file).config.base_model == "some/model"


def test_a_configuration_that_cannot_be_read(file: Path) -> None:
    assert "c.yaml/x: no such file" in refusal(Path("c.yaml/x"))
    assert "cannot be read (File name too long)" in refusal(Path("x" * 300))
    assert "is a folder" in refusal(Path("."))
    assert "is not a regular file" in refusal(Path("/dev/zero"))


def test_every_name_of_another_trainer_is_understood_or_advised_on(file: Path) -> None:
    for name in REPLACEMENT_ADVICE:
        load_config(file, [f"{name}="])
        with pytest.raises(UserError, match=f"^{name}=no such value: "):
            load_config(file, [f"{name}=no such value"])
