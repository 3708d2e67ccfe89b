"""The command line itself: quick, free of torch, and honest."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from launcher.commands import GROUPS, MODULES, app, build_command

CHECKOUT = Path(__file__).parents[2]
DASHES = "settings are written without dashes"
RESUME = "training.resume_from_checkpoint"
REFERENCE = ["scu.enabled=true", "scu.measure=kl", "scu.reference=none.txt"]
CONFIG = "base_model: some/model\noutput_dir: runs/x\ndataset: {path: data.jsonl}\n"


def zerolora(*arguments: str, cwd: Path, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(CHECKOUT), "PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu"} | (variables or {})
    return subprocess.run(
        [sys.executable, "-m", "launcher.cli", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path


def test_nothing_heavy_is_imported() -> None:
    program = "import sys, launcher.commands; print({'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_help_lists_every_subcommand(folder: Path) -> None:
    shown = zerolora("--help", cwd=folder).stdout
    for name in "train config prepare inspect eval generate merge report push ops compare scu-train".split():
        assert name in shown


def test_dry_run_prints_the_command_and_does_nothing(folder: Path) -> None:
    result = zerolora("train", "c.yaml", "seed=7", "--dry-run", "--master-port", "29400", cwd=folder)
    assert result.returncode == 0
    assert result.stderr == "note: model and data were not checked; to check them, run `zerolora validate`\n"
    assert result.stdout.startswith("PYTHONSAFEPATH=1 DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 ")
    assert result.stdout.endswith("deepspeed --num_gpus=2 --master_port=29400 --module trainer.train c.yaml seed=7\n")
    assert [path.name for path in folder.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize("option", ["--schema", "--json-schema"])
def test_the_reference_of_all_settings_takes_no_file(folder: Path, option: str) -> None:
    result = zerolora("config", "c.yaml", option, cwd=folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: c.yaml: {option} takes no file")


def test_the_version_is_printed(folder: Path) -> None:
    result = zerolora("--version", cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("zerolora ") and result.stdout.count("\n") == 1


def test_a_configuration_that_can_be_read_once_is_refused_at_once(folder: Path) -> None:
    """As `zerolora train <(cat c.yaml)` gives it."""
    os.mkfifo(folder / "pipe")
    result = zerolora("train", "pipe", cwd=folder)
    assert result.returncode == 2
    assert result.stderr == "error: pipe: is a pipe, which only one rank could read; pass a regular file\n"


def test_progress_of_the_start_is_printed_line_by_line(folder: Path) -> None:
    (folder / "data.jsonl").touch()
    result = zerolora("train", "c.yaml", cwd=folder, variables={"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    first, second = result.stdout.splitlines()
    assert first.startswith("zerolora ") and first.endswith(": c.yaml") and second == "checking the model some/model"


def test_config_prints_yaml_that_can_be_used_again(folder: Path) -> None:
    result = zerolora("config", "c.yaml", "lora_r=4", cwd=folder)
    assert result.returncode == 0
    assert result.stderr == "note: lora_r is read as lora.r\n"
    assert yaml.safe_load(result.stdout)["lora"]["r"] == 4
    (folder / "again.yaml").write_text(result.stdout)
    assert zerolora("config", "again.yaml", cwd=folder).stdout == result.stdout


def test_json_schema_is_json(folder: Path) -> None:
    assert "base_model" in json.loads(zerolora("config", "--json-schema", cwd=folder).stdout)["properties"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "none.yaml"], "error: none.yaml: no such file"),
        (["train", "c.yaml", "--num-gpus", "0", "--dry-run"], "error: --num-gpus 0: must be 1 to 65536; omit it"),
        (["train", "c.yaml", "lora.rnak=8"], "error: lora.rnak: unknown setting; did you mean lora.r"),
        (["doctor", "--num-gpus", "0"], "error: --num-gpus 0: must be 1 to 65536; omit it"),
        (
            ["submit", "c.yaml", "--gpus", "8"],
            "error: --gpus: not an option of this command; did you mean --gpus-per-",
        ),
        (["init", "dpo"], "error: dpo: not an argument of this command; remove it; see `zerolora init --help`"),
        (["sweep", "c.yaml", "--lora.r=8,9"], f"error: --lora.r=8,9: not an option of `zerolora sweep`; {DASHES}"),
        (["init", "--preset", ""], "error: --preset: must not be empty"),
        (["init", "--model", "https://hf.co/a/b"], "error: --model https://hf.co/a/b: is a URL; use OWNER/NAME on"),
        (["config"], "error: zerolora config: no configuration file"),
        (["trian", "c.yaml"], "error: No such command 'trian'. Did you mean 'train'? See `zerolora --help`"),
        (
            ["train", "c.yaml", "--num-gpu", "2"],
            "error: --num-gpu: not an option of this command; did you mean --num-gpus?",
        ),
        (["train", "c.yaml", "--training.epochs", "3"], f"error: --training.epochs: {DASHES}: training.epochs=VALUE"),
        (["train", "c.yaml", "--lora_r=4"], f"error: --lora_r: {DASHES}: lora_r=VALUE; see `"),
        (["validate", "c.yaml", "--training.max-steps", "3"], f"error: --training.max-steps: {DASHES}: training.max_"),
        (["train", "c.yaml", "--num-gpus", "1000"], "error: --num-gpus 1000: no GPU found, and each CPU rank needs "),
        (["train"], "error: CONFIG: missing; pass the YAML file of the run; see `zerolora train --help`"),
    ],
)
def test_a_mistake_ends_with_2(folder: Path, arguments: list[str], complaint: str) -> None:
    result = zerolora(*arguments, cwd=folder)
    assert result.returncode == 2
    shown = result.stderr.removeprefix("zerolora validate ...\n")
    assert shown.startswith(complaint) and shown.count("\n") == 1
    assert result.stdout == ""
    assert [path.name for path in folder.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["train", "c.yaml"], "error: dataset.path=data.jsonl: no such file or folder"),
        (["train", "c.yaml", "base_model=./none"], "error: base_model=./none: no such folder"),
        (["train", "c.yaml", "model.tokenizer=./none"], "error: model.tokenizer=./none: no such folder"),
        (["train", "c.yaml", "lora.adapter_path=./none"], "error: lora.adapter_path=./none: no such folder"),
        (
            ["train", "c.yaml", "dataset.chat_template=x.jinja"],
            "error: dataset.chat_template=x.jinja: neither a template nor an existing file",
        ),
        (["train", "c.yaml", *REFERENCE], "error: scu.reference=none.txt: no such file or folder"),
        (["train", "c.yaml", "output_dir=/"], "error: output_dir=/: "),
        (["train", "c.yaml", f"{RESUME}=latest"], f"error: {RESUME}=latest: "),
        (["train", "c.yaml", f"{RESUME}=./none"], f"error: {RESUME}=./none: is not a checkpoint folder"),
    ],
)
def test_missing_files_are_found_before_torch_is_imported(folder: Path, words: list[str], complaint: str) -> None:
    result = zerolora(*words, cwd=folder, variables={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    assert result.returncode == 2 and imported
    assert not [line for line in imported if line.endswith((" torch", " transformers"))]
    assert result.stderr.splitlines()[-1].startswith(complaint)


def test_every_subcommand_is_in_one_group_of_the_help() -> None:
    registered = [command.name for command in build_command().commands.values()]
    assert registered == [name for names in GROUPS.values() for name in names]
    assert len(set(registered)) == len(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_grouped(folder: Path, option: str) -> None:
    shown = zerolora(option, cwd=folder).stdout
    places = [shown.index(f" {title} ") for title in GROUPS]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["train", "validate", "scu-train"])
def test_every_command_has_the_same_form_of_help(folder: Path, name: str) -> None:
    shown = zerolora(name, "-h", cwd=folder).stdout
    assert f"Usage: zerolora {name} [OPTIONS]" in shown and "[key=value]..." in shown
    assert "─ Arguments ─" in shown and "─ Options ─" in shown
    assert "--help" in shown and "<" not in shown and "False" not in shown


def test_a_subcommand_of_its_own_module_gets_its_arguments_and_returns_its_code(folder: Path) -> None:
    program = (
        "import sys, launcher.commands as commands\n"
        "commands.GROUPS['Developer'] += ('probe',)\n"
        "commands._add_module_command('probe', 'probe', 'a module')\n"
        "sys.argv[1:] = ['probe', 'RUN', '--help', '-x', '--', '--flag=1']\n"
        "commands.main()\n"
    )
    (folder / "probe.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder, env={"PYTHONPATH": f"{CHECKOUT}:{folder}"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.stdout == "['RUN', '--help', '-x', '--', '--flag=1']\n"
    assert result.returncode == 7


@pytest.mark.parametrize("name", [*MODULES, *"train config init import sweep submit status scu-train".split()])
def test_the_first_line_does_not_wait_for_imports_of_torch(folder: Path, name: str) -> None:
    """A second on an idle machine; also on a pipe, where a module's line precedes its imports and spares stdout."""
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "launcher.cli", name, "--help"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        first = (process.stderr if name in MODULES else process.stdout).readline()
        seconds = time.monotonic() - start
        process.kill()
        rest = process.stdout.read()
    assert (first, rest) == (f"zerolora {name} ...\n", "") if name in MODULES else first != "", first
    assert seconds < 15, f"{seconds:.1f} s"
    print(f"{name}: {seconds:.2f} s")


def test_the_first_line_of_a_long_command_is_not_part_of_its_output(folder: Path) -> None:
    result = zerolora("merge", "--help", cwd=folder)
    assert result.stderr == "zerolora merge ...\n" and "usage" in result.stdout.lower()
    with subprocess.Popen(
        [sys.executable, "-m", "launcher.cli", "doctor"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
    ) as process:  # fmt: skip
        assert process.stderr is not None and process.stderr.readline() == "checking this machine ...\n"
        os.killpg(process.pid, signal.SIGKILL)
