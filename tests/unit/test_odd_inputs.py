"""Odd inputs found from outside: one line with the setting, its value and the fix, and nothing written or lost."""

import contextlib
import gzip
import io
import json
import os
import re
from collections.abc import Callable, KeysView
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.compare.__main__ import main as compare
from benchmarks.tiers.__main__ import main as tier
from launcher.commands import main as zerolora
from launcher.importing.command import translate_arguments
from launcher.status import describe_run
from launcher.targets.slurm import read_allocation
from tests.families import save_family
from tests.runs_in_process import make_ground, train
from tests.tiny import CHATML
from tests.unit.test_after_run import make_run
from tests.vision import make_vision_model
from trainer.checkpoint.base_fingerprint import find_changed_part, fingerprint_base
from trainer.checkpoint.finished_run import find_run
from trainer.commands import generate, push
from trainer.commands.estimate import main as estimate
from trainer.commands.evaluate import main as evaluate
from trainer.commands.export.__main__ import main as export
from trainer.commands.inspect import main as inspect
from trainer.commands.prepare_run import main as prepare_run
from trainer.commands.tailor import main as tailor
from trainer.commands.validate import main as validate
from trainer.config import LoraSection, ModelSection, UserError, load_config
from trainer.config.adapter_settings import read_adapter_settings
from trainer.config.command_line import Main
from trainer.config.evaluation_section import check_task_names
from trainer.config.scu_flags import build_settings, load_flag_config, parse_flags, read_resumed_ranks
from trainer.config.yaml_core import dump
from trainer.config.zero import FIXED_KEYS, KNOWN_KEYS, SETTING_BY_KEY, UNSUPPORTED_KEYS
from trainer.contract.restart_record import AdapterChanges
from trainer.data.prompt_files import read_prompts
from trainer.data.source_files import build_source
from trainer.data.sources import resolve_local_path
from trainer.memory.decisions import Machine
from trainer.memory.model_widths import read_shapes
from trainer.memory.observed import Layer, LayerSettings, observe_layers
from trainer.memory.planner import SHORT, DataSize, Planner
from trainer.memory.stored_weights import ModelShapes
from trainer.model.base import load_model_config
from trainer.monitor.metrics import read_metrics
from trainer.monitor.report.__main__ import main as report
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
        ('{"model_type": "llama"}', "was not written by zerolora; use another file"),
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


def test_a_tilde_after_an_option_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.argv", ["zerolora", "init", "--output=~/mine.yaml"])
    assert zerolora() == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["home", "mine.yaml"]


def test_init_refuses_a_preset_for_another_kind_of_model(tmp_path: Path, refuse: Command) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("{}")
    line = refuse("init", "--preset", "sdxl", "--model", "text")
    assert "--preset sdxl: does not fit --model text, which has a config.json; use --preset tinyllama" in line
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_init_refuses_a_folder_without_a_model(tmp_path: Path, refuse: Command) -> None:
    (tmp_path / "empty").mkdir()
    assert "--model empty: the folder has no config.json; use the folder of a" in refuse("init", "--model", "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("name", ["c.txt", "c.csv", "c.jsonl"])
def test_a_configuration_may_have_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("# mine\nbase_model: m\ndataset: {path: d}\n")
    assert load_config(tmp_path / name).config.base_model == "m"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train", "error: CONFIG: missing; pass the YAML file of the run; see `zerolora train --help`"),
        ("train --config c.yaml", "error: --config: not an option; pass the configuration file without it; see"),
        ("train c.yaml --hostfile", "error: --hostfile: has no value; write one after it; see"),
        ("train c.yaml --hostfile=", "error: --hostfile: must not be empty; pass a value, or omit it"),
        ("train c.yaml --hostfile bin", "error: --hostfile bin: line 1: byte 0x98 is not UTF-8; write one line per ho"),
        ("doctor --hostfile bin", "error: --hostfile bin: line 1: byte 0x98 is not UTF-8; write one line per host"),
        ("train c.yaml --num-gpus two", "error: --num-gpus two: must be a whole number; see `zerolora train --help`"),
        ("train data.jsonl", "error: data.jsonl: contains data; pass the run's YAML file, and set dataset.path=data"),
        ("train c.yaml --epochs 3", "error: --epochs: settings are written without dashes: training.epochs=VALUE; see"),
        ("train c.yaml training.epochs 3", "error: training.epochs: not an override; write training.epochs=VALUE"),
        ("submit c.yaml --partition= --dry-run", "error: --partition: must not be empty; pass a value, or omit it"),
        ("submit c.yaml --sbatch=--nodes\t4", "error: --sbatch '--nodes\\t4': contains a space; write --nodes=4"),
        ("status c.yaml extra", "error: extra: not an argument of this command; remove it; see"),
        ("adapters add many.yaml", "error: FILE|NAME: missing; pass file to add (YAML), or adapter name to remove"),
        ("adapters add run 5.yaml", "error: 5.yaml: adapters=5: must be a list of sections, such as [{name: b}]"),
        ("adapters add run zero.yaml", "error: zero.yaml: adapters.0.lora.r=0: must be 1 or more"),
        ("adapters add run twice.yaml", "error: twice.yaml:2: name: duplicate (line 2, first in line 1); keep one"),
        ("train c.yaml -seed=1", "error: -seed=1: settings are written without dashes: seed=VALUE; see"),
        ("submit c.yaml --nodes 0", "error: --nodes 0: must be 1 or more; see"),
        ("submit c.yaml --grace 99999", "error: --grace 99999: must be 65535 or less; see"),
        ("adapters foo emptiness x", "error: zerolora adapters foo: unknown action; use add or remove"),
        ("c.yaml seed=1", "error: c.yaml: not a command; to train with this file, run `zerolora train c.yaml`; see `z"),
        ("import x.yaml -o", "error: -o: has no value; write one after it; see `zerolora import --help`"),
    ],
)
def test_command_lines_are_refused(words: str, line: str, tmp_path: Path, refuse: Command) -> None:
    (tmp_path / "c.yaml").write_text("base_model: m\noutput_dir: run\ndataset: {path: d}\n")
    (tmp_path / "5.yaml").write_text("adapters: 5\n")
    (tmp_path / "zero.yaml").write_text("name: b\nlora: {r: 0}\n")
    (tmp_path / "twice.yaml").write_text("name: b\nname: c\n")
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "bin").write_bytes(b"\x98\x00")
    AdapterChanges(["c.yaml", "adapters=[{name: a}]"], str(tmp_path)).write(tmp_path / "run")
    assert refuse(*words.split(" ")).startswith(line)


@pytest.mark.parametrize("words", ["train c.yaml --launcher", "submit c.yaml --partition"])
def test_spaces_around_values_are_no_part_of_them(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "c.yaml").write_text("base_model: m\noutput_dir: run\ndataset: {path: d}\n")
    shown = []
    for value in ("local", " local\n"):
        options = ["--dry-run", *["--master-port", "29871"] * words.startswith("train")]
        monkeypatch.setattr("sys.argv", ["zerolora", *words.split(), value, *options])
        assert zerolora() == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("parallel.sequence=2", "--ranks", "3"),
            "error: parallel.sequence=2: does not divide the 3 ranks of this run",
        ),
        (("--ranks", "3"), " --num-gpus 3"),
        (("--ranks", "3", "--settings-only"), " --ranks 3"),
        (("dataset.evaluation.path={data}",), "note: dataset.evaluation.path={data}: is the training data"),
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
    assert config.known - {*SETTING_BY_KEY, *FIXED_KEYS, *UNSUPPORTED_KEYS} == set(KNOWN_KEYS)


def test_an_empty_model_is_not_taken_for_none(tmp_path: Path, refuse: Command) -> None:
    assert refuse("init", "--model", "") == "error: --model: must not be empty; pass a value, or omit it"
    assert not list(tmp_path.iterdir())


def test_values_for_other_programs_are_checked(tmp_path: Path, refuse: Command) -> None:
    (tmp_path / "c.yaml").write_text("base_model: m\noutput_dir: run\ndataset: {path: d}\n")
    (tmp_path / "hosts").write_text("-oProxyCommand=x slots=1\n")
    assert "line 1 is '-oProxyCommand=x slots=1'; it must look like" in refuse("train", "c.yaml", "--hostfile", "hosts")
    for limit in ("0", "x"):
        assert "must be task numbers" in refuse("submit", "c.yaml", "--array", f"0-3%{limit}", "--dry-run")
    assert "--output x/y.yaml: its folder does not exist" in refuse("init", "--gpus", "1", "--output", "x/y.yaml")


def test_two_forms_of_the_reference_are_refused(refuse: Command) -> None:
    assert "--schema: cannot be combined with --json-schema" in refuse("config", "--schema", "--json-schema")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("trl sft --model_name_or_path m --dataset_name d --desirable_weight -1", "--desirable_weight=-1: must not be"),
        (
            "trl nosuch --model_name_or_path m --dataset_name d",
            "trl nosuch: not a command of TRL; use trl sft, dpo, kto",
        ),
        ("trl sft --model_name_or_path m --dataset_name d --bf16 --fp16", "--fp16: bf16 is also set; remove"),
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
    ("token", "offline", "line"), [(None, False, "not logged in to the Hub; run"), ("hf_x", True, "HF_HUB_OFFLINE")]
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
        DataSize(40, 40),
        Machine(1, False, "fp32", own_kernels=False, flash=False),
    )
    assert len(set(planner.shapes.layers)) == 2, "the first layer has one norm more"
    work = planner.build_micro_step(config, planner.build_decisions(config))
    lengths = []

    def observe(shapes: ModelShapes, settings: LayerSettings, rows: int) -> dict[int, Layer]:
        lengths.append(settings.length)
        return observe_layers(shapes, settings, rows)

    monkeypatch.setattr("trainer.memory.planner.observe_layers", observe)
    seen = planner.estimate_activations(work)
    assert set(lengths) == {SHORT, 2 * SHORT}
    monkeypatch.setattr("trainer.memory.planner.TOKEN_BY_TOKEN", ())
    assert planner.estimate_activations(work) == seen and 40 in lengths


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
        ("lora_alpha", None, "lora_alpha=none: must be a number"),
        ("target_modules", 5, "target_modules=5: must be a list"),
        ("init_lora_weights", [], r"init_lora_weights=\[\]: must be true or false"),
        ("bias", [], r"bias=\[\]: must be 'none', 'all' or 'lora_only'"),
        ("layers_to_transform", "x", 'layers_to_transform="x": must be a list'),
    ],
)
def test_a_key_of_an_adapter_is_named_in_words_for_users(key: str, value: object, line: str, tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, key: value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f": {line}; restore or replace the file"):
        read_adapter_settings(tmp_path)


def test_a_prompt_of_another_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": {"text": "x"}}\n')
    with pytest.raises(UserError, match=r"record 1: prompt is a record; it must be a string or a list of turns$"):
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
    with pytest.raises(UserError, match=r"not answers labeled true or false .* set dataset.format: unpaired"):
        prepare(load_config(ground / "base.yaml", words).config)


@pytest.mark.parametrize(
    ("main", "words", "line"),
    [
        (compare, ["--lambdas", "0.1,y"], "--lambdas=y: must be a positive number, such as 0.1"),
        (compare, ["--lambdas", "1,,2"], "--lambdas='1,,2': has an empty entry; remove it"),
        (estimate, ["--ranks", "8"], "--ranks: not an option of this command; did you mean --gpus? See `zerolora"),
        (estimate, ["--max-length", "9"], "--max-length=9: must be auto; see `zerolora estimate --help`"),
        (generate.main, ["--base-model", " "], "--base-model: must not be empty; pass a value, or omit it; see `"),
        (
            generate.main,
            ["--raw", "--chat"],
            "--chat: cannot be combined with --raw; remove one of them; see `zerolora",
        ),
        (push.main, ["me/x", "y"], "y: not an argument of this command; remove it; see `zerolora push --help`"),
        (push.main, [], "REPO: missing; pass owner/name on the Hub; created if missing; see `zerolora push --help`"),
        (push.main, [""], "REPO: must not be empty; pass a value, or omit it; see `zerolora push --help`"),
        (export, ["--format"], "--format: has no value; write one after it; see `zerolora export --help`"),
        (export, ["--format", "hf", "y"], "y: not an argument of this command; write --output y, or remove it; see `"),
        (
            prepare_run,
            ["--nproc_per_node", "8"],
            "--nproc_per_node: not an option of this command; did you mean --world",
        ),
        (prepare_run, ["--epochs", "8"], "--epochs: settings are written without dashes: training.epochs=VALUE; see"),
        (prepare_run, ["--ranks", "8"], "--ranks: not an option of this command; did you mean --world-size? See"),
    ],
)
def test_options_are_named(main: Main, words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["x.yaml", *words])
    assert f"error: {line}" in capsys.readouterr().err


def test_a_damaged_record_is_not_taken_for_one_rank(tmp_path: Path) -> None:
    assert read_resumed_ranks(tmp_path) == 1, "no record"
    for size in ("0", '"x"', "null"):
        (tmp_path / "run.json").write_text(f'{{"world_size": {size}}}')
        with pytest.raises(UserError, match=r'run.json: world_size="?\w+"?: must be'):
            read_resumed_ranks(tmp_path)


def test_a_flag_of_the_guide_has_one_mistake(tmp_path: Path) -> None:
    options = parse_flags(["--lora-r", "-1", "--output-dir", str(tmp_path / "run")])
    (tmp_path / "flags.yaml").write_text(dump(build_settings(options, "train.txt", None)))
    with pytest.raises(UserError) as caught:
        load_flag_config(tmp_path / "flags.yaml", options)
    assert str(caught.value) == "--lora-r=-1: must be 1 or more"


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["training.eval_steps=0.5"], r"training.eval_steps=0.5: no data is held out"),
        (["training.eval_steps=1.5"], r"eval_steps=1.5: must be a whole number, or below 1 as a fraction of the run"),
        (["dataset.val_split=true"], r"must be a number \(.*: a fraction up to 0.5, or a number \(1 or more\)\)"),
        (
            ["dataset.roles={user: [x], assistant: [x, y]}"],
            r"dataset.roles={user: \[x\], assistant: \[x, y\]}: x is listed under several roles; list it once",
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
        ("seed: 1\n...\nlora: {r: 4}\n", "; write settings as `name: value`, without lines of `...` or %YAML$"),
        ("lora.r: 4\nlora: {r: 8}\n", "lora.r: given twice, as a dotted name and in its section; keep one"),
        (
            "model.rope_scaling.factor: 2\nmodel: {rope_scaling: {type: yarn, factor: 4}}\n",
            "model.rope_scaling: given tw",
        ),
        ("model: {rope_scaling: {type: yarn}}\nmodel.rope_scaling.type: linear\n", "model.rope_scaling.type: given tw"),
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
        ("d.json", [{"messages": ["a", "b"]}], [], "record 1, turn 1: is a string; write a record with role and"),
        ("d.json", {"train": [CHAT], "test": [CHAT]}, [], "d.json: is a mapping of lists .train, test."),
        ("d.json", [{"q": "a"}], ["dataset.format=prompt_completion", "dataset.fields={prompt: q, completion: q}"],
         "dataset.fields.prompt=q: is also used for completion; use another field"),
        ("d.jsonl", {"prompt": "q", "chosen": "a", "rejected": ["b", "c"]}, ["task=preference"],
         "record 1: rejected is a list of strings; keep one of them"),
        ("d.json", {"version": 1, "data": [CHAT]}, [], r"is a mapping of lists \(data\), .*, e.g. {messages: data}"),
        ("d.json", [CHAT], ["dataset.path=*.jsonl"], "use a folder with patterns in dataset.data_files, or several"),
        ("d.jsonl", None, [], "d.jsonl is a symlink to gone, which does not exist; fix the path, or the link"),
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
    with pytest.raises(UserError, match=r"^output_dir=/proc/x: /proc is on a virtual file system; use another folder$"):
        prepare(load_config(ground / "base.yaml", ["output_dir=/proc/x"]).config)
    file = ground / "train.jsonl"
    with pytest.raises(UserError, match=r"cannot be written \(File exists\); use a folder, not a file$"):
        prepare(load_config(ground / "base.yaml", [f"dataset.cache_dir={file}"]).config)


def test_a_link_to_itself_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ground, link = make_ground(tmp_path), tmp_path / "link"
    link.symlink_to(link)
    problem = f": {link} is a symlink to {link}, which leads back to it; "
    for name in ("dataset.cache_dir", "dataset.path", "dataset.chat_template", "base_model", "output_dir"):
        for path in (link, link / "x"):
            assert validate([str(ground / "base.yaml"), f"{name}={path}"]) == 2
            assert f"{name}={path}{problem}" in capsys.readouterr().err
    for place, call in (
        (f"{link}/metrics.jsonl", lambda: report([str(link), str(ground)])),
        (link, lambda: generate.main([str(link), "hi"])),
        (f"--json={link}", lambda: evaluate([str(ground / "run"), "--json", str(link)])),
    ):
        assert call() == 2
        assert f"{place}{problem}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["train", "c.yaml", "--num-gpus", "two"],
            "error: --num-gpus two: must be a whole number; see `zerolora train",
        ),
        (["train", "c.yaml", "--num-gpus=two"], "error: --num-gpus two: must be a whole number; see `zerolora train"),
        (["doctor", "--launcher", "mpi", "--num-gpus", "65537"], "error: --num-gpus 65537: must be 1 to 65536"),
        (["submit", "c.yaml", "--nodes", "x"], "error: --nodes x: must be a whole number; see `zerolora submit"),
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
        ("--price", "free"): "--price=free: must be a number",
        ("--gpu-memory", ""): "--gpu-memory: must not be empty; pass a value, or omit it",
        ("--gpu-memory", "-5GiB"): "--gpu-memory -5GiB: not an amount of memory; write 80GiB",
    }.items():
        with contextlib.suppress(SystemExit):
            estimate([config, *words])
        assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (estimate, ["c.yaml", "--gpus"]),
        (validate, ["c.yaml", "--ranks"]),
        (inspect, ["c.yaml", "--ranks"]),
        (prepare_run, ["c.yaml", "--world-size"]),
        (tailor, ["--model", "m", "--data", "d", "--output", "o.yaml", "--output-dir", "o", "--gpus"]),
    ],
)
def test_too_many_ranks_are_refused(main: Main, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, "10000000000"])
    assert f"{words[-1]}=10000000000: must be a whole number, 1 to 65536; see `zerolora " in capsys.readouterr().err


def test_a_number_that_is_too_large_is_compared_in_short(tmp_path: Path) -> None:
    for value, line in (("NaN", "a finite number"), ("1e305", r"below 1e\+\d+")):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "time": 1.0, "train/loss": {value}}}\n')
        with pytest.raises(UserError, match=rf"\(train/loss=.*: must be {line}\)"):
            list(read_metrics(tmp_path))


def test_the_strategy_of_fsdp_is_taken_from_its_words(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for words, stage in {"[shard_grad_op, auto_wrap]": 2, "full_shard auto_wrap offload": 3}.items():
        file.write_text(AXOLOTL + f"fsdp: {words}\n")
        assert translate_arguments([str(file)]).get_setting("zero.stage") == stage


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("flash_attn: fa9\n", "yaml:5: flash_attn=fa9: must be true or false, or 'auto', 'disabled', 'sdpa'"),
        ("stage: dpo\npref_loss: nope\n", "pref_loss=nope: must be sigmoid, hinge, ipo, orpo, simpo or another"),
        ("max_samples: 0\n", "yaml:5: max_samples=0: must be 1 or more; remove it to use all records"),
        ("eval_dataset: none-such\n", "yaml:5: eval_dataset=none-such: none-such is missing"),
    ],
)
def test_odd_values_of_llamafactory_are_named(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"d": {"file_name": "d.json"}, "e": {"file_name": "e.json"}}')
    file = tmp_path / "l.yaml"
    head = "model_name_or_path: m\ndataset: d\ntemplate: qwen\nfinetuning_type: lora\n"
    file.write_text(head + text)
    with pytest.raises(UserError) as caught:
        translate_arguments([str(file)], tmp_path)
    assert line in str(caught.value)
    file.write_text(head + "eval_dataset: d, e\n")
    assert ("eval_dataset", "only the first of 2 is used") in translate_arguments([str(file)], tmp_path).left_out


def test_compressed_data_without_its_suffix_is_named(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    (ground / "d.jsonl").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(UserError, match=r"d.jsonl is compressed with gzip; rename it to end in .gz$"):
        prepare(load_config(ground / "base.yaml", [f"dataset.path={ground / 'd.jsonl'}"]).config)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("import a.yaml --dataset-dir none", "--dataset-dir none: no such folder; pass the folder"),
        ("import a.yaml --dataset-dir .", "--dataset-dir .: not supported for Axolotl; remove the option"),
        ("submit c.yaml --dry-run --sbatch ", "--sbatch '': must be one line that begins with dashes"),
        ("init --model d.jsonl", "--model d.jsonl: is a file; use the folder of a saved model"),
        ("init --model m --gpu-memory 8GiB", "--gpu-memory 8GiB: has no effect without a model and data"),
        ("status none", "none: is neither a job ID nor the folder of a run; pass a run's output_dir"),
        ("sweep c.yaml lora.target_modules=q,v", "lora.target_modules=q,v is a single value (a list); pass several"),
        ("train c.yaml --hostfile hosts --include a: --dry-run", "--include a:: a has no slot ''; use 0 to 1"),
        (
            "config d.jsonl",
            "d.jsonl: contains data; pass the run's YAML file, and set dataset.path=d.jsonl",
        ),
    ],
)
def test_odd_words_of_commands_are_named(words: str, line: str, tmp_path: Path, refuse: Command) -> None:
    files = {
        "a.yaml": AXOLOTL,
        "c.yaml": "base_model: m\ndataset: {path: d}\n",
        "hosts": "a slots=2\n",
        "d.jsonl": "{}\n" * 2,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert line in refuse(*words.split(" "))
    assert {path.name for path in tmp_path.iterdir()} == files.keys()


def test_a_file_for_the_runs_of_a_tier_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d").write_text("")
    assert tier(["quick", "--cpu", "--output", str(tmp_path / "d")]) == 2
    assert f"--output {tmp_path / 'd'}: is a file; use a folder" in capsys.readouterr().err


def test_one_missing_file_of_an_adapter_was_deleted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "adapter_config.json").unlink()
    with pytest.raises(UserError, match=r"adapter_config.json is missing: the run did not finish, or the file was"):
        find_run(run)
    with pytest.raises(UserError, match=r"adapter_model.safetensors: is a file; pass the output_dir of a run"):
        find_run(run / "adapter_model.safetensors")


def test_a_file_without_prompts_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("\n\n")
    assert generate.main([str(make_run(tmp_path)), "--prompts", str(tmp_path / "p.txt")]) == 2
    assert "p.txt: contains no prompt; write one per line" in capsys.readouterr().err


def test_metrics_of_one_damaged_line_are_not_called_empty(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"line 1 is not a record of a step"):
        read_metrics(tmp_path)


def test_an_error_of_one_adapter_names_it(tmp_path: Path) -> None:
    words = ["adapters=[{name: a},{name: b, lora.target_modules: none_such}]"]
    with pytest.raises(UserError, match=r"^adapter b: lora.target_modules=none_such: matches no layer"):
        prepare(load_config(make_ground(tmp_path) / "base.yaml", words).config)


def test_several_adapters_of_experts_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    words = ["adapters=[{name: a},{name: b}]", "base_model=random:olmoe-1b-7b", f"model.tokenizer={ground / 'model'}"]
    with pytest.raises(UserError, match=r"set lora\.experts: false"):
        prepare(load_config(ground / "base.yaml", words).config)
    assert len(prepare(load_config(ground / "base.yaml", [*words, "lora.experts=false"]).config).adapters) == 2


def test_warnings_of_adapters_are_shown(tmp_path: Path) -> None:
    words = ["adapters=[{name: a, training.learning_rate: 0.5},{name: b}]"]
    notes = load_config(make_ground(tmp_path) / "base.yaml", words).notes
    assert any(note.startswith("a: training.learning_rate=0.5: far above") for note in notes)


def test_a_model_that_cannot_be_built_and_its_template_are_named(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    (ground / "model" / "chat_template.jinja").write_text("{{ bad")
    with pytest.raises(UserError, match=r"^the tokenizer's chat template: cannot be rendered \(line 1: "):
        prepare(load_config(ground / "base.yaml").config)
    file = ground / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": -1}))
    with pytest.raises(
        UserError, match=r"config.json: vocab_size=-1: must be above 0; copy the file from the original model"
    ):
        prepare(load_config(ground / "base.yaml").config)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"bits": "4"}, 'quantization_config.bits="4": must be a whole number'),
        ({"bits": 4, "group_size": "128"}, 'quantization_config.group_size="128": must be a whole number'),
        ({"bits": 4, "group_size": 0}, "group_size 0, but only -1"),
        ({"bits": 4, "desc_act": "false"}, 'quantization_config.desc_act="false": must be true or false'),
    ],
)
def test_types_of_a_quantised_model_are_checked(changes: dict[str, object], line: str, tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    file = ground / "model" / "config.json"
    quantised = {"quantization_config": {"quant_method": "gptq", **changes}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantised))
    with pytest.raises(UserError, match=re.escape(line)):
        prepare(load_config(ground / "base.yaml").config)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["adapters=[{name: a},{name: b}]", "adapter=none"], "adapter=none: not possible with several adapters"),
        (
            ["adapters=[{name: a, preference.loss: kto},{name: b}]", "task=preference"],
            "preference.loss={kto: 1.0}: not",
        ),
        (["adapters=[{name: checkpoint-1},{name: b}]"], "adapters.0.name=checkpoint-1: is reserved or already used"),
        (["lora.null=3"], "lora.null: unknown setting"),
        (["dataset.mix[0].path=x"], "dataset.mix[0]: unknown setting; did you mean dataset.mix, the whole list?"),
        (["dataset.evaluatoin.path=x"], "dataset.evaluatoin: unknown setting; did you mean dataset.evaluation?"),
        (["dataset.fields={5: a}"], "dataset.fields.5=5: must be a string"),
        (["training.num_gpus=2"], "training.num_gpus: unknown setting; `zerolora config --schema` lists all"),
        (["dataset.seed=1"], "dataset.seed: unknown setting; did you mean seed?"),
        (["zero.extra={fp16:"], "close its brackets, quote it in the shell"),
        (["adapters=[{name: a, scu.kp: 1},{name: b}]"], "adapters.0.scu.kp=1.0: has no effect, because scu.enabled"),
        (
            ["adapters=[{name: a, lora: {r: 2}, lora.r: 3},{name: b}]"],
            "adapters.0.lora.r=3: given twice with different",
        ),
        (
            ["adapters=[{name: a},{name: b, lora_r: 3, lora: {r: 2}}]"],
            "adapters.1.lora.r=2: given twice with different",
        ),
        (
            ["adapters=[{name: a, dataset.evaluation.path: x, dataset: {evaluation: {path: y}}},{name: b}]"],
            "adapters.0.dataset.evaluation={path: y}: given twice with different values; keep one",
        ),
        (["adapters=[{name: a, lora: 5},{name: b}]"], "adapters.0.lora=5: must be a section; write `lora.r: ...`"),
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
    assert resolve_local_path(build_source("none", "--data"), "--data") == tmp_path / "none"


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
        (
            ["dataset.chat_template={{ 1/0 }}"],
            r"^dataset.chat_template={{ 1/0 }}: cannot be rendered \(division by zero\); .* set another",
        ),
        (
            ["dataset.chat_template={broken}"],
            r"^dataset.chat_template=[^ ]*broken.jinja: cannot be rendered \(line 2: [^\n]*\); fix the template",
        ),
        (
            ["dataset.chat_template={no_system}", "dataset.system_prompt=Hi"],
            r"record 1: the chat template rejects it \(no system turns\); remove dataset.system_prompt, or fix the",
        ),
        (["logging.sample_prompts=['']"], r"^logging.sample_prompts='': is empty; write a prompt"),
        (["logging.sample_prompts=[{empty}.txt]"], r"^logging.sample_prompts=.*jinja.txt: contains no prompt"),
        (
            ["logging.sample_prompts=[" + "red " * 300 + "]"],
            r"^logging.sample_prompts=red red .* red: the prompt has \d+ tokens, but the context holds 256; shorten it",
        ),
        (["dataset.chat_template={empty}"], r"empty.jinja: the file is empty; write a template into it"),
        (["dataset.min_pixels=999999999"], r"^dataset.min_pixels=999999999: must be 50000000 or less"),
        (["vision.cache=true"], r"^vision.cache=true: has no effect, because no record"),
        (["lora.adapter_path={empty}"], r"empty.jinja: is a file; use the folder of a PEFT adapter$"),
        (
            ["dataset.path=file:///x.jsonl"],
            r"file:///x.jsonl: this kind of URL is not supported; write it without file://",
        ),
        (["base_model=s3://bucket/model"], r"is a URL; use OWNER/NAME on the Hub, such as .*, or a folder$"),
        (
            ["training.lr_scheduler=warmup_stable_decay", "training.decay_ratio=0.99", "training.warmup_ratio=0.5"],
            r"^training.decay_ratio=0.99: plus training.warmup_ratio=0.5 exceeds 1; lower one of them",
        ),
        (
            ["dataset.workers=4", "dataset.streaming=true", "training.max_steps=4"],
            r"^dataset.workers=4: has no effect, because dataset.streaming",
        ),
        (
            ["task=preference", "preference.gamma=1"],
            r"^preference.gamma=1: has no effect, because preference.loss is {",
        ),
        (
            ["task=preference", "preference.loss=hinge", "preference.label_smoothing=0.1"],
            r"=0.1: has no effect",
        ),
        (["task=preference", "preference.discopop_tau=1"], r"^preference.discopop_tau=1: has no effect, because"),
        (['model.pad_token=""'], r"^model.pad_token='': empty; write a value, or remove the setting"),
        (
            ["lora.target_parameters=q_proj.weight"],
            r"^lora.target_parameters=q_proj.weight: already adapted by",
        ),
        (
            ["dataset.fields={role: nope}"],
            r"turn 1: has no nope \(the turn has role, content\); add it, or name",
        ),
        (
            ["evaluation.metrics=json_schema", "evaluation.json_schema=gone.json", "dataset.val_split=4"],
            r"gone.json: no such file; use a file with",
        ),
        (["output_dir=ftp://none.invalid/x"], r"^output_dir=ftp://none.invalid/x: cannot be accessed"),
        (
            ["output_dir=s3:/bucket/x"],
            r"^output_dir=s3:/bucket/x: has only one slash after s3:; ",
        ),
        (["dataset.path=s3:/bucket/x"], r"dataset.path=s3:/bucket/x: has only one slash after s3:"),
        (
            ["output_dir=gone/../run"],
            r"^output_dir=gone/../run: gone does not exist, so .. after it cannot be resolved",
        ),
        (["dataset.train_on=all,user"], r"^dataset.train_on=\[all, user\]: all includes every role; keep one"),
        (["dataset.mix={path: a}", "dataset.path=null"], r"^dataset.mix={path: a}: must be a list of [^\n]*$"),
    ],
)
def test_settings_are_named_with_value_and_fix(words: list[str], line: str, tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    empty = ground / "empty.jinja"
    for file in (empty, ground / "empty.jinja.txt"):
        file.write_text("\n")
    (ground / "broken.jinja").write_text("\n{% for m in messages %}{{ m.content }}")
    refuse_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    (ground / "no_system.jinja").write_text(refuse_system + CHATML)
    with pytest.raises(UserError, match=line):
        words = [word.replace("{empty}", str(empty)) for word in words]
        words = [re.sub(r"{(broken|no_system)}", rf"{ground}/\1.jinja", word) for word in words]
        prepare(load_config(ground / "base.yaml", words).config)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        (
            "d.parquet",
            b"version https://git-lfs.github.com/spec/v1\n",
            "d.parquet is a Git LFS pointer, not the data",
        ),
        ("d.parquet", b"", "d.parquet: has no records; use another dataset"),
        (
            "d.jsonl",
            b'{"messages": ["a", {"role": "user", "content": "b"}]}\n',
            "record 1, turn 1: is a string; write a record",
        ),
        ("d.parquet", b"prompt,completion\n", "d.parquet: d.parquet is truncated or not Parquet; copy or rename it"),
        (
            "d.jsonl",
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}\n',
            "turn 2: the assistant turn has no content; add the field",
        ),
        ("d.jsonl", b'{"text ": "a"}\n', "the records have 'text ', not messages"),
        ("d.csv", b"a,\n1,2\n", "the CSV file, which does not name column 2), not messages"),
        ("d.jsonl", b'\xef\xbb\xbf\r\n{"text": "a"}\r\n\r\n{"text": 3}\r\n', "record 2 (line 4 of d.jsonl): text is a"),
        (
            "d.jsonl",
            b'{"text": null}\n{"text": "a"}\n',
            "record 1: text is missing (the record has no fields); add it, or",
        ),
        (
            "d.jsonl",
            b'{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "c", "label": false}\n',
            "record 1: label is missing; set it to true",
        ),
        ("d.csv", b"# made by x\nprompt,completion\na,b\n", "remove lines above the header"),
    ],
)
def test_a_file_of_data_is_described_as_it_is(name: str, content: bytes, line: str, tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    (ground / name).write_bytes(content)
    if not content:
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), ground / name)
    with pytest.raises(UserError, match=re.escape(line)):
        prepare(load_config(ground / "base.yaml", [f"dataset.path={ground / name}"]).config)


def test_settings_that_the_data_does_not_use_are_reported(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    words = [f"base_model={make_vision_model(tmp_path / 'vision', 'qwen2_5_vl')}", "dataset.max_pixels=900"]
    with pytest.raises(UserError, match=r"^dataset.max_pixels=900: has no effect, because no record has an image"):
        prepare(load_config(ground / "base.yaml", words).config)
    (ground / "d.jsonl").write_text('{"text": "a b c"}\n' * 4)
    words = [f"dataset.path={ground / 'd.jsonl'}", "dataset.system_prompt=be kind"]
    notes = prepare(load_config(ground / "base.yaml", words).config).data.stats.notes
    assert "warning: dataset: texts have no prompt, so dataset.system_prompt is not used" in notes


def test_an_image_in_an_answer_is_refused(tmp_path: Path) -> None:
    part = {"type": "image", "path": "a.png"}
    turns = [{"role": "user", "content": "draw"}, {"role": "assistant", "content": [part]}]
    ground = make_ground(tmp_path)
    (ground / "d.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(UserError, match="record 1, turn 2: an assistant turn has an image, but answers are text; move"):
        prepare(load_config(ground / "base.yaml", [f"dataset.path={ground / 'd.jsonl'}"]).config)


AXOLOTL = "base_model: m\nadapter: qlora\ndatasets: [{path: d, type: alpaca}]\nmicro_batch_size: 1\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("output_dir: [a]\n", "output_dir=[a]: must be a string, not a list"),
        ("streaming: true\n", "streaming=true: the length of a streamed dataset is unknown"),
        (
            "pretraining_dataset: [{path: d, type: completion}]\n",
            "pretraining_dataset: the length of a streamed dataset is",
        ),
        ("xformers_attention: sure\n", "xformers_attention=sure: must be true or false"),
        ("load_in_4bit: true\nload_in_8bit: true\n", "load_in_8bit=true: load_in_4bit is also set; remove one"),
        ("fsdp_config: full_shard\n", "fsdp_config=full_shard: no such file; copy it here, or nest its keys"),
        ("fsdp: [full_shards]\n", "fsdp=[full_shards]: full_shards: must be one of auto_wrap, full_shard"),
        ("fsdp_config: {sharding_strategy: 9}\n", "sharding_strategy=9: must be one of FULL_SHARD"),
        ("torch_dtype: float99\n", "torch_dtype=float99: must be auto, bfloat16, float16 or float32"),
        ("attn_implementation: nope\n", "attn_implementation=nope: must be eager, sdpa, flash_attention_2 or _3"),
        ("trl sft --model_name_or_path m --dataset_name d --dtype int8", "--dtype=int8: must be auto, bfloat16"),
        ("rl: dpo\nrpo_alpha: -1\n", "rpo_alpha=-1: must be 0 or more"),
        ("test_datasets: [{path: e, type: alpaca}]\nval_set_size: 0.1\n", "val_set_size=0.1: test_datasets is also"),
        ("saves_per_epoch: 2\nsave_steps: 9\n", "saves_per_epoch=2: save_steps is also set; remove one of them"),
        ("cosine_min_lr_ratio: 2\n", "cosine_min_lr_ratio=2: must be between 0 and 1"),
        (
            "trl sft --model_name_or_path m --dataset_name d --learning_rate=",
            "--learning_rate: missing value after the =",
        ),
        (
            "trl sft --model_name_or_path m --dataset_name d -seed 5",
            "-seed: options begin with two dashes; write",
        ),
        ("trl", "trl: not a command of TRL; use trl sft"),
        (
            "trl sft --model_name_or_path m --dataset_name d --load_in_4bit",
            "--load_in_4bit: quantized weights cannot be",
        ),
        ("trl sft --model_name_or_path m --dataset_name d --config", "--config: missing value; pass a configuration"),
        ("trl sft --model_name_or_path m --dataset_name", "--dataset_name: missing value; add it after the option"),
        ("trl sft --model_name_or_path m --dataset_name d --load_in_4bit --load_in_8bit", "load_in_4bit is also set"),
    ],
)
def test_values_that_another_trainer_refuses_are_refused(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(AXOLOTL + text)
    with pytest.raises(UserError) as caught:
        translate_arguments(text.split() if text.startswith("trl") else [str(file)])
    assert line in str(caught.value)


def test_an_option_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--from: not an option of zerolora import; pass only a.yaml$"):
        translate_arguments(["a.yaml", "--from", "axolotl"])
    with pytest.raises(UserError, match=r"^--lr_scheduler_kwargs.num_cycles=0: must be 1 or more$"):
        words = "--model_name_or_path m --dataset_name d --lr_scheduler_type cosine_with_restarts".split()
        translate_arguments(["trl", "sft", *words, "--lr_scheduler_kwargs", '{"num_cycles": 0}'])
    (tmp_path / "a.yaml").write_text(AXOLOTL.replace("alpaca", "chat_template, roles_to_train: [robot]"))
    with pytest.raises(UserError, match=r":3: datasets.0.roles_to_train=\[robot\]: .*choose from assistant"):
        translate_arguments([str(tmp_path / "a.yaml")])


def test_a_mistyped_key_of_another_trainer_is_corrected(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(AXOLOTL + "learning_rte: 1e-3\nsomething: 5\nlora_rnk: 8\n")
    left_out = dict(translate_arguments([str(tmp_path / "a.yaml")]).left_out)
    assert left_out["learning_rte"].endswith(": did you mean learning_rate?")
    assert left_out["lora_rnk"].endswith(": did you mean lora_r?")
    assert left_out["something"].endswith("no equivalent in zerolora")


def test_muon_of_llamafactory_replaces_its_optimizer(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"d": {"file_name": "d.json"}}')
    file = tmp_path / "l.yaml"
    file.write_text(
        "stage: sft\nmodel_name_or_path: m\ndataset: d\ntemplate: qwen\nuse_muon: true\noptim: adamw_torch\n"
    )
    assert translate_arguments([str(file)], tmp_path).get_setting("training.optimizer") == "muon"


def test_data_of_llamafactory_may_be_listed_next_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"d": {"file_name": "d.json"}}')
    (tmp_path / "l.yaml").write_text("stage: sft\nmodel_name_or_path: m\ndataset: d\ntemplate: qwen\n")
    path = translate_arguments([str(tmp_path / "l.yaml")]).get_setting("dataset.path")
    assert Path(path) == tmp_path / "d.json"


def test_an_adapter_that_trl_would_not_train_is_reported() -> None:
    words = "trl sft --model_name_or_path m --dataset_name d --lora_r 8"
    name, remark = translate_arguments(words.split()).different[0]
    assert name == "lora_r" and remark.startswith("without use_peft, TRL trains all weights")


def test_fsdp_and_deepspeed_are_not_both_imported(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(AXOLOTL + "fsdp: [full_shard]\ndeepspeed: zero2.json\n")
    with pytest.raises(UserError, match=r"deepspeed=zero2\.json: fsdp is set as well; remove one of them"):
        translate_arguments([str(tmp_path / "a.yaml")])


def test_a_length_of_trl_without_a_limit_is_reported() -> None:
    words = "trl sft --model_name_or_path m --dataset_name d --max_length None"
    assert "TRL would not truncate" in dict(translate_arguments(words.split()).different)["max_length"]


def test_a_source_of_llamafactory_without_a_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"d": {"cloud_file_name": "s3://b/x"}}')
    file = tmp_path / "l.yaml"
    file.write_text("stage: sft\nmodel_name_or_path: m\ndataset: d\ntemplate: qwen\nfinetuning_type: lora\n")
    with pytest.raises(UserError, match="d: needs hf_hub_url or file_name; add one"):
        translate_arguments([str(file)], tmp_path)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("base_model=./none", "base_model=./none: no such folder ("),
        pytest.param(
            "--model me/none",
            "base_model=me/none: not a local folder, not in the Hub's cache",
            marks=pytest.mark.slow,
        ),
        ("--model {model} --data pairs.jsonl", "task=auto: dataset has pairs of a chosen and a rejected answer"),
    ],
)
def test_scu_train_writes_nothing_before_its_inputs_are_checked(
    words: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ground, folder = make_ground(tmp_path / "ground"), tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ZEROLORA_CACHE", str(tmp_path / "cache"))
    (folder / "data.txt").write_text("a b c\n")
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 40)
    words = words.format(model=ground / "model") + " --data data.txt" * ("--data" not in words)
    typed = f"zerolora scu-train --output-dir run {words}".split()
    monkeypatch.setattr("sys.argv", typed)
    assert zerolora() == 2
    assert f"error: {line}" in capfd.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["data.txt", "pairs.jsonl"]


def test_layers_that_the_adapter_does_not_reach_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    deeper = save_family(tmp_path / "deeper", "llama", num_hidden_layers=9)
    find_run(run, str(deeper), allow_mismatch=True)
    assert f"note: base_model={deeper}: has 9 layers, but the adapter " in capsys.readouterr().err


def test_what_allow_mismatch_accepts_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    (run / "run.json").unlink()
    find_run(run, allow_mismatch=True)
    line = "run.json, which records the base model and settings of the run, is missing or incomplete"
    assert capsys.readouterr().err == f"note: {run}: {line}; allowed by --allow-mismatch\n"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, ""),
        ({"r": 8}, r"does not match this model: .*q_proj.lora_A.* has shape .4, 64. in the adapter, .*; use the base"),
        ({"target_modules": ["q_proj"]}, r"24 of the 28 tensors of the adapter match no layer .first: .*k_proj"),
        ({"use_dora": True}, r"14 tensors of the adapted model are not in the file"),
        ({"trainable_token_indices": {"embed_tokens": [3]}}, "embed_tokens.* is missing"),
        ({"lora_alpha": 0}, r"^lora.adapter_path=.*: adapter_config.json: lora_alpha=0: must be above 0"),
        ({"layer_replication": [[0, 2]]}, "must be null"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens=\[1, 2\]: must be null"),
        ({"use_qalora": True}, "use_qalora=true: must be False"),
        ({"kasa_config": {"rank": 4}}, r"kasa_config=\{rank: 4\}: must be null"),
        ({"rank_pattern": {"q_[": 8}}, r"rank_pattern.q_\[.*: q_\[ is not a valid regular expression"),
        (
            {"exclude_modules": "("},
            r'exclude_modules="\(": \( is not a valid .*unterminated subpattern at position 0\);',
        ),
        ({"init_lora_weights": "foo"}, 'adapter_config.json: init_lora_weights="foo": not a known value'),
        (
            {"layers_to_transform": [0], "exclude_modules": None},
            r"layers_to_transform=\[0\], but it has tensors of the layers \[0, 1\]",
        ),
    ],
)
def test_an_initial_adapter_that_does_not_fit_is_refused_before_weights_are_loaded(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    run_dir = make_run(tmp_path, lora={"target_modules": ["all-linear"]})
    settings = run_dir / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"exclude_modules": "lm_head"} | changes))
    ground = make_ground(tmp_path)
    with pytest.raises(UserError, match=line) if line else contextlib.nullcontext():
        words = [f"lora.adapter_path={run_dir}", f"output_dir={tmp_path / 'second'}"]
        prepare(load_config(ground / "base.yaml", words).config)


def test_an_initial_adapter_with_a_weight_of_the_base_is_refused(tmp_path: Path) -> None:
    """PEFT stores the embeddings of a resized model in the adapter, and would load, but not save them again."""
    run_dir = make_run(tmp_path, lora={"target_modules": ["all-linear"]})
    file = run_dir / "adapter_model.safetensors"
    head = {"base_model.model.lm_head.weight": torch.zeros(384, 64)}
    save_file(load_file(file) | head, file, {"format": "pt"})
    ground = make_ground(tmp_path)
    words = [f"lora.adapter_path={run_dir}", f"output_dir={tmp_path / 'second'}"]
    with pytest.raises(UserError, match=r"it also has base_model.model.lm_head.weight, a weight of the base"):
        prepare(load_config(ground / "base.yaml", words).config)


def test_the_record_and_card_show_the_rank_of_the_initial_adapter(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    train(ground, training__max_steps=1)
    train(
        ground, training__max_steps=1, lora__adapter_path=str(ground / "run"), output_dir=str(ground / "b"), lora__r=16
    )
    assert json.loads((ground / "b" / "training_config.json").read_text())["lora"]["r"] == 4
    assert "lora r=4, " in (ground / "b" / "README.md").read_text()


@pytest.mark.parametrize("settings", [{"eos_token_id": "2"}, {"repetition_penalty": 0}, {"bad_words_ids": [5]}])
def test_settings_of_generation_are_checked_before_training(settings: dict[str, Any], tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    (ground / "model" / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        UserError, match=rf"generation_config.json: {next(iter(settings))}.*; copy the file from the or"
    ):
        prepare(load_config(ground / "base.yaml").config)


def test_an_initial_adapter_with_a_larger_embedding_fits(tmp_path: Path) -> None:
    """The embedding of the base grows to the tokenizer once its weights are loaded."""
    ground, tokens = make_ground(tmp_path), [f"<t{number}>" for number in range(80)]
    in_full = ["embed_tokens", "lm_head"]
    train(ground, model__added_tokens=tokens, lora__modules_to_save=in_full, training__max_steps=1)
    words = [f"lora.adapter_path={ground / 'run'}", f"model.tokenizer={ground / 'run'}"]
    prepare(load_config(ground / "base.yaml", [*words, f"output_dir={tmp_path / 'second'}"]).config)


def test_standard_input_without_a_prompt_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n \n"))
    assert generate.main([str(run_dir)]) == 2
    assert "standard input: has no prompt" in capsys.readouterr().err


def test_options_of_which_one_has_no_effect_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        inspect([str(make_ground(tmp_path) / "base.yaml"), "--step", "1", "--examples", "2"])
    assert "--examples: cannot be combined with --step" in capsys.readouterr().err
