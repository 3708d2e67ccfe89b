"""Odd inputs found from outside: one line with the setting, its value and the fix, and nothing written or lost."""

import contextlib
import json
import os
import re
from collections.abc import Callable, KeysView
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare.__main__ import main as compare
from launcher.commands import main as zerolora
from launcher.importing.command import translate_arguments
from launcher.status import describe_run
from launcher.targets.slurm import read_allocation
from tests.families import save_family
from tests.runs_in_process import make_ground
from tests.unit.test_after_run import make_run
from trainer.checkpoint.base_fingerprint import find_changed_part, fingerprint_base
from trainer.checkpoint.finished_run import find_run
from trainer.commands import push
from trainer.commands.estimate import main as estimate
from trainer.commands.validate import main as validate
from trainer.config import LoraSection, ModelSection, UserError, load_config
from trainer.config.adapter_settings import read_adapter_settings
from trainer.config.evaluation_section import check_task_names
from trainer.config.scu_flags import load_flags, parse, settings
from trainer.config.yaml_core import dump
from trainer.config.zero import FIXED, KNOWN, REPLACE, SETTINGS
from trainer.data.prompt_files import read_prompts
from trainer.data.source_files import build_source
from trainer.data.sources import find_local_path
from trainer.memory.decisions import Machine
from trainer.memory.model_widths import read_shapes
from trainer.memory.observed import Kernels, Layer, observe_layers
from trainer.memory.planner import SHORT, Lengths, Planner
from trainer.memory.stored_weights import Shapes
from trainer.model.base import load_model_config
from trainer.monitor.metrics import read_metrics
from trainer.setup.preflight import prepare

Command = Callable[..., str]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run a command in a folder, which must end with 2 after one line, and return the line."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["zerolora", *words])
        assert zerolora() == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    return run


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"model_type": "llama"}', "was not written by zerolora, and is not replaced; use another file"),
        ("base_model: m\n", "was not written by zerolora"),
    ],
)
def test_init_and_import_replace_only_what_they_wrote(content: str, line: str, tmp_path: Path, refuse: Command) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    (tmp_path / "axolotl.yaml").write_text("base_model: m\ndatasets: [{path: d, type: alpaca}]\nmicro_batch_size: 1\n")
    assert line in refuse("init", "--force", "--output", "config.json")
    assert line in refuse("import", "axolotl.yaml", "--force", "--output", "config.json")
    assert file.read_text() == content


def test_init_writes_its_own_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["zerolora", "init", "--force", "--output", "mine.yaml"])
    assert (zerolora(), zerolora()) == (0, 0)


def test_init_refuses_a_folder_without_a_model(tmp_path: Path, refuse: Command) -> None:
    (tmp_path / "empty").mkdir()
    assert "--model empty: the folder has no config.json; use the folder of a" in refuse("init", "--model", "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("parallel.sequence=2", "--ranks", "3"),
            "error: parallel.sequence=2: does not divide the 3 ranks of this run",
        ),
        (("dataset.evaluation.path={data}",), "note: dataset.evaluation.path={data}: is the training data, and shows"),
    ],
)
def test_validate_reports_what_training_would_meet(
    words: tuple[str, ...], line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ground = make_ground(tmp_path)
    data = str(ground / "train.jsonl")
    validate([str(ground / "base.yaml"), *(word.format(data=data) for word in words)])
    said = capfd.readouterr()
    assert line.format(data=data) in said.out + said.err


def test_an_empty_list_is_no_prompt(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    (ground / "pairs.jsonl").write_text('{"prompt": [], "chosen": "a", "rejected": "b"}\n')
    words = [f"dataset.path={ground / 'pairs.jsonl'}", "task=preference"]
    with pytest.raises(UserError, match="record 1: chosen and rejected have no common prompt"):
        prepare(load_config(ground / "base.yaml", words).config)


class RecordedKeys(dict[str, Any]):
    """A configuration that records the keys that DeepSpeed looks for."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.known: set[object] = set()

    def __contains__(self, key: object) -> bool:
        self.known.add(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def keys(self) -> Any:
        return KeysView(self)


def test_the_keys_of_deepspeed_are_those_that_it_reads() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = RecordedKeys({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}})
    DeepSpeedConfig(config)
    assert config.known - {*SETTINGS, *FIXED, *REPLACE} == set(KNOWN)


def test_an_empty_model_is_not_taken_for_none(tmp_path: Path, refuse: Command) -> None:
    assert refuse("init", "--model", "") == "error: --model: empty; write a value, or leave it out"
    assert not list(tmp_path.iterdir())


def test_two_forms_of_the_reference_are_refused(refuse: Command) -> None:
    assert "--schema: cannot be combined with --json-schema" in refuse("config", "--schema", "--json-schema")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("trl sft --model_name_or_path m --dataset_name d --desirable_weight -1", "--desirable_weight=-1: must not be"),
        ("trl nosuch --model_name_or_path m --dataset_name d", "trl nosuch: no command of TRL; use trl sft, dpo, kto"),
        ("trl sft --model_name_or_path m --dataset_name d --bf16 --fp16", "--fp16: bf16 is set as well; remove"),
    ],
)
def test_values_that_would_be_dropped_are_checked(words: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        translate_arguments(words.split())
    assert line in str(caught.value)


def test_an_unknown_stage_names_the_known_ones(tmp_path: Path) -> None:
    file = tmp_path / "llama.yaml"
    file.write_text("stage: xyz\nmodel_name_or_path: m\ndataset: d\ntemplate: qwen\n")
    with pytest.raises(UserError, match=r"yaml:1: stage=xyz: must be sft, pt, dpo, kto or rm"):
        translate_arguments([str(file)])


@pytest.mark.parametrize(
    ("token", "offline", "line"), [(None, False, "not logged in to the hub; run"), ("hf_x", True, "HF_HUB_OFFLINE")]
)
def test_push_checks_the_login_before_it_writes(
    token: str | None,
    offline: bool,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(tmp_path)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != "README.md"}
    (run / "README.md").unlink(missing_ok=True)
    monkeypatch.setattr(push, "get_token", lambda: token)
    monkeypatch.setattr(push, "is_offline_mode", lambda: offline)
    assert push.main([str(run), "me/tiny"]) == 2
    assert line in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_unknown_tasks_are_found_without_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager.__init__", None)
    check_task_names(["gsm8k", "mmlu_*", "hellaswag"])
    with pytest.raises(UserError, match=r"^evaluation.tasks=gsm8kk: not a task of lm-eval; did you mean gsm8k\?$"):
        check_task_names(["gsm8kk"])
    with pytest.raises(UserError, match=r"^--tasks=none.yaml: no such file"):
        check_task_names(["none.yaml"], "--tasks")


def test_code_of_another_repository_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--me--code"
    code = cache / "snapshots" / ("a" * 40) / "modeling.py"
    for folder in (cache / "refs", code.parent, tmp_path / "model"):
        folder.mkdir(parents=True)
    (cache / "refs" / "main").write_text("a" * 40)
    code.write_text("SCALE = 1\n")
    settings = {"auto_map": {"AutoModel": "me/code--modeling.Mine", "AutoTokenizer": ["me/code--modeling.T", None]}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    trusted = ModelSection(trust_remote_code=True)
    first = fingerprint_base(str(tmp_path / "model"), trusted)
    code.write_text("SCALE = 2\n")
    assert find_changed_part(first, fingerprint_base(str(tmp_path / "model"), trusted)) == "me/code/modeling.py"
    assert "me/code/modeling.py" not in fingerprint_base(str(tmp_path / "model"), ModelSection())


def test_a_loop_over_tokens_is_observed_for_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(save_family(tmp_path / "model", "rwkv", num_hidden_layers=4))
    config = load_config(make_ground(tmp_path / "ground") / "base.yaml").config
    model = load_model_config(folder, ModelSection())
    planner = Planner(
        read_shapes(model, ModelSection(), LoraSection()),
        Lengths(40, 40),
        Machine(1, False, "fp32", own_kernels=False, flash=False),
    )
    assert len(set(planner.shapes.layers)) == 2, "the first layer has one norm more"
    work = planner.work(config, planner.decisions(config))
    lengths = []

    def observe(shapes: Shapes, kernels: Kernels, rows: int) -> dict[int, Layer]:
        lengths.append(kernels.length)
        return observe_layers(shapes, kernels, rows)

    monkeypatch.setattr("trainer.memory.planner.observe_layers", observe)
    seen = planner.seen(work)
    assert set(lengths) == {SHORT, 2 * SHORT}
    monkeypatch.setattr("trainer.memory.planner.TOKEN_BY_TOKEN", ())
    assert planner.seen(work) == seen and 40 in lengths


def test_data_of_another_task_is_not_cached(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    for words in (["task=preference"], ["logging.sample_prompts=none.jsonl"], ["evaluation.metrics=none.py:f"]):
        words += ["dataset.evaluation.path=" + str(ground / "held_out.jsonl")] * ("metrics" in words[0])
        with pytest.raises(UserError):
            prepare(load_config(ground / "base.yaml", words).config)
        assert not list((ground / "cache").rglob("*.arrow")), words
    prepare(load_config(ground / "base.yaml").config)
    assert list((ground / "cache").rglob("*.arrow"))


@pytest.mark.parametrize("line", ["garbage", '{"step": -1, "train/loss": 2.0}'])
def test_status_reports_unreadable_metrics(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    assert ("step", "unknown, as metrics.jsonl cannot be read") in describe_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert ("step", "none yet") in describe_run(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("lora_alpha", None, "lora_alpha: must be a whole number"),
        ("target_modules", 5, "target_modules: must be a list"),
    ],
)
def test_a_key_of_an_adapter_is_named_in_words_for_users(key: str, value: object, line: str, tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, key: value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f": {line}; restore or replace the file"):
        read_adapter_settings(tmp_path)


def test_a_prompt_of_another_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": {"text": "x"}}\n')
    with pytest.raises(UserError, match=r"record 1: prompt is a record; write a text, or a list of turns$"):
        list(read_prompts(str(tmp_path / "prompts.jsonl"), "--prompts"))


@pytest.mark.parametrize("columns", [{"prompt": ["a"], "completion": ["b"]}, {"text": {"0": "a", "1": "b"}}])
def test_columns_are_not_taken_for_a_record(columns: dict[str, object], tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    (ground / "train.json").write_text(json.dumps(columns))
    with pytest.raises(UserError, match=r"train.json, record 1\b.* is a (list|record)"):
        prepare(load_config(ground / "base.yaml", [f"dataset.path={ground / 'train.json'}"]).config)


def test_labels_that_are_numbers_are_named(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    (ground / "kto.jsonl").write_text('{"prompt": "a", "completion": "b", "label": 1}\n' * 2)
    words = [f"dataset.path={ground / 'kto.jsonl'}", "task=preference", "preference.loss=kto"]
    with pytest.raises(UserError, match="2 of 2 records of dataset are not answers labelled true or false"):
        prepare(load_config(ground / "base.yaml", words).config)


def test_numbers_of_compare_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare(["x.yaml", "--lambdas", "0.1,y"])
    assert "argument --lambdas: y: must be a positive number, such as 0.1" in capsys.readouterr().err


def test_a_flag_of_the_guide_has_one_mistake(tmp_path: Path) -> None:
    options = parse(["--lora-r", "-1", "--output-dir", str(tmp_path / "run")])
    (tmp_path / "flags.yaml").write_text(dump(settings(options, "train.txt", None)))
    with pytest.raises(UserError) as caught:
        load_flags(tmp_path / "flags.yaml", options)
    assert str(caught.value) == "--lora-r=-1: must be 1 or more"


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["training.eval_steps=0.5"], r"training.eval_steps=0.5: nothing is held out"),
        (["training.eval_steps=1.5"], r"eval_steps=1.5: must be a whole number, or below 1 as a fraction of the run"),
        (["dataset.val_split=true"], r"must be a number \(.*: a fraction up to 0.5, or a number \(1 or more\)\)"),
        (
            ["dataset.roles={user: [x], assistant: [x, y]}"],
            r"dataset.roles={user: \[x\], assistant: \[x, y\]}: x is listed for several roles; keep one of them",
        ),
    ],
)
def test_a_value_is_shown_as_it_was_given(words: list[str], line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line):
        load_config(make_ground(tmp_path) / "base.yaml", words)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lora: !!set {r}\n", "line 1, column 7: could not determine .*'; remove the tag, which begins with !$"),
        ("seed: 1\n...\nlora: {r: 4}\n", "; write settings as `name: value`, and no line of three dots between them$"),
        ("'': 1\n", "error: '': unknown setting"),
    ],
)
def test_yaml_that_is_no_setting_has_a_fix(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(tmp_path / "c.yaml")
    assert re.search(line, f"error: {caught.value}", re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "content", "more", "line"),
    [
        ("d.json", {"prompt": ["a"], "completion": ["b"]}, [], "record 1: each field is a list .prompt, completion."),
        ("d.json", {"train": [CHAT], "test": [CHAT]}, [], "d.json: each field is a list of records .train, test."),
        ("d.json", [{"q": "a"}], ["dataset.format=prompt_completion", "dataset.fields={prompt: q, completion: q}"],
         "dataset.fields.prompt=q: is also used for completion; use another field"),
        ("d.jsonl", {"prompt": "q", "chosen": "a", "rejected": ["b", "c"]}, ["task=preference"],
         "record 1: rejected is a list of texts; keep one of them"),
        ("d.jsonl", None, [], "d.jsonl: is a link to gone, which does not exist; fix the path, or the link"),
    ],
)  # fmt: skip
def test_data_of_another_form_is_described(name: str, content: Any, more: list[str], line: str, tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    if content is None:
        (ground / name).symlink_to("gone")
    else:
        (ground / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=line):
        prepare(load_config(ground / "base.yaml", [f"dataset.path={ground / name}", *more]).config)


def test_places_that_are_no_folders_are_named(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    with pytest.raises(UserError, match=r"^output_dir=/proc/x: /proc is on no disk; use another folder$"):
        prepare(load_config(ground / "base.yaml", ["output_dir=/proc/x"]).config)
    file = ground / "train.jsonl"
    with pytest.raises(UserError, match=r"cannot be written there \(File exists\); use a folder, not a file$"):
        prepare(load_config(ground / "base.yaml", [f"dataset.cache_dir={file}"]).config)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train", "c.yaml", "--num-gpus", "two"], "error: --num-gpus two: must be a whole number; `zerolora train"),
        (["train", "c.yaml", "--num-gpus=two"], "error: --num-gpus two: must be a whole number; `zerolora train"),
        (["submit", "c.yaml", "--nodes", "x"], "error: --nodes x: must be a whole number; `zerolora submit"),
    ],
)
def test_numbers_of_the_launcher_are_named(words: list[str], line: str, refuse: Command) -> None:
    assert refuse(*words).startswith(line)


def test_nodes_that_cannot_be_listed_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `scontrol` that fails, as without a configuration of SLURM."""
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho 'scontrol: fatal: no configuration' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    problem = r"scontrol cannot list its nodes \(scontrol: fatal: no configuration\); run this on a host of the cluster"
    with pytest.raises(UserError, match=rf"^SLURM_JOB_NODELIST=n\[1-2\]: {problem}"):
        read_allocation(given)


def test_values_of_commands_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(make_ground(tmp_path) / "base.yaml")
    for words, line in {
        ("--price", "free"): "--price: free: must be a number",
        ("--gpu-memory", "-5GiB"): "--gpu-memory -5GiB: not an amount of memory; write 80GiB",
    }.items():
        with contextlib.suppress(SystemExit):
            estimate([config, *words])
        assert line in capsys.readouterr().err


def test_a_number_that_is_too_large_is_compared_in_short(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "train/loss": NaN}\n')
    with pytest.raises(UserError, match=r"\(train/loss: must be below 1e\+\d+\)"):
        list(read_metrics(tmp_path))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["adapters=[{name: a},{name: b}]", "adapter=none"], "adapter=none: not possible with several adapters"),
        (["adapters=[{name: checkpoint-1},{name: b}]"], "adapters.0.name=checkpoint-1: is used already"),
        (["lora.null=3"], "lora.null: unknown setting"),
    ],
)
def test_adapters_and_names_that_cannot_be(words: list[str], line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        load_config(make_ground(tmp_path) / "base.yaml", words)


@pytest.mark.parametrize(("key", "shown"), [("null", "null"), ("~", "null"), ("true", "true")])
def test_a_key_that_is_no_word_is_shown_as_yaml(key: str, shown: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for text, name in ((f"{key}: 5\n", shown), (f"lora: {{{key}: 5}}\n", f"lora.{shown}")):
        file.write_text(text)
        with pytest.raises(UserError) as caught:
            load_config(file)
        assert f"{name}: unknown setting" in str(caught.value)


def test_a_file_named_none_is_not_taken_for_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").mkdir()
    assert find_local_path(build_source("none", "--data"), "--data") == tmp_path / "none"


@pytest.mark.parametrize("content", ["{}", "[]", '{"_data_files": [{}]}', '{"_data_files": 5}', "null"])
def test_a_damaged_saved_data_set_is_one_line(content: str, tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    saved = ground / "saved"
    saved.mkdir()
    for name in ("state.json", "dataset_info.json"):
        (saved / name).write_text(content)
    with pytest.raises(UserError, match=r"saved: cannot be read as a saved dataset \(.*\); save or copy it again$"):
        prepare(load_config(ground / "base.yaml", [f"dataset.path={saved}"]).config)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["dataset.chat_template={{ 1/0 }}"], r"^dataset.chat_template={{ 1/0 }}: this template cannot be used"),
        (["dataset.chat_template={empty}"], r"empty.jinja: the file is empty; write a template into it"),
        (["dataset.min_pixels=999999999"], r"^dataset.min_pixels=999999999: must be 50000000 or less"),
        (["vision.cache=true"], r"^vision.cache=true: has no effect, because no record"),
        (["lora.adapter_path={empty}"], r"empty.jinja: is a file; use the folder of a PEFT adapter$"),
        (
            ["dataset.path=file:///x.jsonl"],
            r"file:///x.jsonl: URLs of this kind cannot be read; write it without file://",
        ),
        (["base_model=s3://bucket/model"], r"is a URL; use a folder or OWNER/NAME$"),
    ],
)
def test_settings_are_named_with_value_and_fix(words: list[str], line: str, tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    empty = ground / "empty.jinja"
    empty.write_text("\n")
    with pytest.raises(UserError, match=line):
        words = [word.replace("{empty}", str(empty)) for word in words]
        prepare(load_config(ground / "base.yaml", words).config)


def test_an_image_in_an_answer_is_refused(tmp_path: Path) -> None:
    part = {"type": "image", "path": "a.png"}
    turns = [{"role": "user", "content": "draw"}, {"role": "assistant", "content": [part]}]
    ground = make_ground(tmp_path)
    (ground / "d.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(UserError, match="record 1, turn 2: an assistant turn has an image, and answers are text; move"):
        prepare(load_config(ground / "base.yaml", [f"dataset.path={ground / 'd.jsonl'}"]).config)


AXOLOTL = "base_model: m\nadapter: qlora\ndatasets: [{path: d, type: alpaca}]\nmicro_batch_size: 1\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("xformers_attention: sure\n", "xformers_attention=sure: must be true or false"),
        ("load_in_4bit: true\nload_in_8bit: true\n", "load_in_8bit=true: load_in_4bit is set as well; remove one"),
        ("trl", "trl: no command of TRL; use trl sft"),
        ("trl sft --model_name_or_path m --dataset_name", "--dataset_name: has no value; write one after it"),
        ("trl sft --model_name_or_path m --dataset_name d --load_in_4bit --load_in_8bit", "load_in_4bit is set as"),
    ],
)
def test_values_that_another_trainer_refuses_are_refused(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(AXOLOTL + text)
    with pytest.raises(UserError) as caught:
        translate_arguments(text.split() if text.startswith("trl") else [str(file)])
    assert line in str(caught.value)


def test_a_length_of_trl_without_a_limit_is_reported() -> None:
    words = "trl sft --model_name_or_path m --dataset_name d --max_length None"
    assert "no text is cut there" in dict(translate_arguments(words.split()).different)["max_length"]


def test_a_source_of_llamafactory_without_a_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"d": {"cloud_file_name": "s3://b/x"}}')
    file = tmp_path / "l.yaml"
    file.write_text("stage: sft\nmodel_name_or_path: m\ndataset: d\ntemplate: qwen\nfinetuning_type: lora\n")
    with pytest.raises(UserError, match="d: must have hf_hub_url or file_name; write one"):
        translate_arguments([str(file)], tmp_path)


def test_a_missing_model_is_refused_before_scu_train_writes(tmp_path: Path, refuse: Command) -> None:
    (tmp_path / "data.txt").write_text("a b c\n")
    line = refuse("scu-train", "--data", "data.txt", "--output-dir", "run", "base_model=./none")
    assert line == "error: base_model=./none: no such folder; use the folder of a model, or its name on the hub"
    assert [path.name for path in tmp_path.iterdir()] == ["data.txt"]


def test_what_allow_mismatch_accepts_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    (run / "run.json").unlink()
    find_run(run, allow_mismatch=True)
    line = "run.json, which records the base and the settings of the run, is missing or incomplete"
    assert capsys.readouterr().err == f"note: {run}: {line}; allowed by --allow-mismatch\n"
