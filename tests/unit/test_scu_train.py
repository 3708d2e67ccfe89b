"""`zerolora scu-train`: the flags of the published guide, what they mean here, and one short run of a tiny model."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.scu_train import check_requirements
from tests.cluster.hosts import needs_programs
from tests.tiny import make_model, write_chats
from trainer.config import RunConfig, UserError, load_config, scu_flags
from trainer.contract.exit_codes import EXIT_DELAY_S
from trainer.contract.rendezvous import find_free_port

CHECKOUT = Path(__file__).parents[2]
LOG = scu_flags.LOG_FILE.name


def config_of(folder: Path, *flags: str) -> RunConfig:
    options = scu_flags.parse_flags(flags)
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(scu_flags.build_settings(options, options.data or "text.jsonl", None)))
    return load_config(path, options.overrides).config


def value(config: RunConfig, name: str) -> Any:
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_the_defaults_are_those_of_the_guide(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert {name: value(config, name) for name in DEFAULTS} == DEFAULTS


def test_a_run_in_place_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    options = scu_flags.parse_flags(["--resume-from-checkpoint", str(tmp_path / "run")])
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(UserError, match=f"{tmp_path} has no training_config.json; use a checkpoint-N in the folder of"):
        scu_flags.load_resumed_settings(options)
    (tmp_path / "run" / "training_config.json").write_text("{}")
    with pytest.raises(UserError, match=f"run: is a run, not a checkpoint; use {tmp_path}/run/checkpoint-5$"):
        scu_flags.load_resumed_settings(options)


DEFAULTS: dict[str, Any] = {
    "base_model": "ibm-granite/granite-4.0-h-1b",
    "adapter": "lora",
    "output_dir": "./granite_1b_cuda_output",
    "training.batch_size": 8,
    "training.gradient_accumulation_steps": 4,
    "training.learning_rate": 1e-4,
    "training.max_steps": 1000,
    "training.save_steps": 100,  # the guide says 200, and resumes from checkpoint-500
    "training.precision": "auto",
    "training.gradient_checkpointing": "auto",
    "training.torch_compile": False,
    "training.memory_fraction": None,
    "training.resume_from_checkpoint": None,
    "training.weight_decay": 0.0,
    "dataset.max_length": 1024,
    "dataset.too_long": "split",
    "lora.r": 16,
    "lora.alpha": 32.0,
    "scu.enabled": True,
    "scu.controller": "pi",
    "scu.measure": "delta",
    "scu.target": 0.02,
    "scu.kp": 0.6,
    "scu.ki": 0.1,
    "scu.every": 5,
    "scu.deadband": 0.001,
    "scu.lambda_start": 0.1,
    "scu.lambda_min": 1e-4,
    "scu.lambda_max": 2.0,
}


@pytest.mark.parametrize(
    ("flags", "name", "expected"),
    [
        ("--fp16", "training.precision", "fp16"),
        ("--bf16", "training.precision", "bf16"),
        ("--batch-size 3", "training.batch_size", 3),
        ("--gradient-accumulation-steps 7", "training.gradient_accumulation_steps", 7),
        ("--learning-rate 3e-5", "training.learning_rate", 3e-5),
        ("--max-steps 12", "training.max_steps", 12),
        ("--block-size 99", "dataset.max_length", 99),
        ("--lora-r 4", "lora.r", 4),
        ("--lora-r 4", "lora.alpha", 8.0),
        ("--torch-compile", "training.torch_compile", True),
        ("--cudnn-benchmark", "training.cudnn_benchmark", True),
        ("--4bit-quantization", "adapter", "qlora"),
        ("--resume-from-checkpoint runs/x/checkpoint-5", "training.resume_from_checkpoint", "runs/x/checkpoint-5"),
        ("--resume-from-checkpoint", "training.resume_from_checkpoint", "latest"),
        ("--output-dir elsewhere", "output_dir", "elsewhere"),
        ("--save-steps 33", "training.save_steps", 33),
        ("--target-s 0.05", "scu.target", 0.05),
        ("--kp 0.9", "scu.kp", 0.9),
        ("--ki 0.2", "scu.ki", 0.2),
        ("--control-frequency 2", "scu.every", 2),
        ("--memory-fraction 0.8", "training.memory_fraction", 0.8),
        ("--gradient-checkpointing", "training.gradient_checkpointing", "non_reentrant"),
        ("--model my/model", "base_model", "my/model"),
        ("--data my.txt", "dataset.path", "my.txt"),
        ("--measure factors", "scu.measure", "factors"),
        ("--kp 0.6 scu.sigma=0.5", "scu.sigma", 0.5),
        ("--test-run", "training.max_steps", 10),
        ("--test-run --max-steps 3", "training.max_steps", 3),
        ("--test-run", "dataset.max_length", 128),
    ],
)
def test_a_flag_sets_what_it_names_and_nothing_else(tmp_path: Path, flags: str, name: str, expected: Any) -> None:
    assert value(config_of(tmp_path), name) != expected
    config = config_of(tmp_path, *flags.split())
    assert value(config, name) == expected
    if not {"--test-run", "--lora-r"} & set(flags.split()):
        changed = {other for other in DEFAULTS if value(config, other) != DEFAULTS[other]}
        assert changed <= {name}


CARD_CASES = [
    ("rtx3080", "qlora", 4, 8, "fp16", 8, False, 1000),
    ("rtx4090", "lora", 16, 2, "bf16", 16, True, 2000),
    ("a100", "lora", 32, 4, "bf16", 16, True, 5000),
    ("h100", "lora", 32, 1, "bf16", 16, False, 1000),  # not in the guide
]


@pytest.mark.parametrize(
    ("card", "adapter", "batch_size", "accumulation", "precision", "rank", "compiled", "steps"), CARD_CASES
)
def test_card_presets_are_the_recipes_of_the_guide(
    tmp_path: Path,
    card: str,
    adapter: str,
    batch_size: int,
    accumulation: int,
    precision: str,
    rank: int,
    compiled: bool,
    steps: int,
) -> None:
    config = config_of(tmp_path, "--card", card)
    training = config.training
    assert (config.adapter, training.batch_size, training.precision) == (adapter, batch_size, precision)
    assert (training.gradient_accumulation_steps, config.lora.r) == (accumulation, rank)
    assert (training.torch_compile, training.max_steps) == (compiled, steps)
    for flag, expected in (("--fp16", "fp16"), ("--bf16", "bf16")):
        smaller = config_of(tmp_path, "--card", card, "--batch-size", "2", flag)
        assert (smaller.training.batch_size, smaller.training.precision) == (2, expected)


def test_every_card_has_a_recipe_that_is_compared_and_the_one_of_our_own_is_named_as_such() -> None:
    cards = {case[0] for case in CARD_CASES}
    assert set(scu_flags.GPU_RECIPES) == cards == set(scu_flags.FLAGS["card"]["choices"])
    assert "h100: zerolora's recipe" in scu_flags.FLAGS["card"]["help"]


def test_every_documented_flag_exists() -> None:
    documented = (
        "--fp16 --bf16 --batch-size --gradient-accumulation-steps --learning-rate --max-steps --block-size --lora-r "
        "--multi-gpu --torch-compile --4bit-quantization --test-run --check-requirements --resume-from-checkpoint "
        "--output-dir --save-steps --target-s --kp --ki --control-frequency --memory-fraction --gradient-checkpointing"
    )
    shown = zerolora("scu-train", "--help").stdout
    assert [flag for flag in documented.split() if flag not in shown] == []


@pytest.mark.parametrize(("flags", "gpus"), [([], ["--num-gpus", "1"]), (["--multi-gpu"], [])])
def test_dry_run_prints_the_yaml_and_the_train_command(tmp_path: Path, flags: list[str], gpus: list[str]) -> None:
    result = zerolora("scu-train", "--dry-run", "--data", "x.jsonl", "--output-dir", "out", *flags, cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.splitlines()[0] == " ".join(["# zerolora train out/logs/scu-train.yaml", *gpus])
    assert yaml.safe_load(result.stdout)["scu"]["target"] == 0.02
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--batchsize", "8"], "--batchsize: not an option of this command; did you mean --batch-size?"),
        (["--batch", "8"], "--batch: not an option of this command; did you mean --batch-size?"),
        (["--batch-size", "many"], "--batch-size=many: must be a whole number"),
        (["--batch-size", "0"], "--batch-size=0: must be 1 or more"),
        (["--fp16", "--bf16"], "--bf16: cannot be combined with --fp16; remove one"),
        (["--target-s", "2"], "--target-s=2"),
        (["--memory-fraction", "1.5"], "--memory-fraction=1.5"),
        (["scu.kpp=1"], "did you mean scu.kp"),
    ],
)
def test_a_bad_flag_is_one_line_and_2(tmp_path: Path, flags: list[str], complaint: str) -> None:
    result = zerolora("scu-train", "--data", "x.jsonl", *flags, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert complaint in result.stderr and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_flags_may_be_written_with_underscores() -> None:
    options = scu_flags.parse_flags(["--lora_r", "8", "--output_dir= x", "--4bit_quantization"])
    assert (options.lora_r, options.output_dir, options.four_bit) == (8, "x", True)


def test_an_unknown_flag_raises() -> None:
    with pytest.raises(SystemExit, match="2"):
        scu_flags.parse_flags(["--nothing"])


def executable(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_requirements_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver's own tool answers as it does on a machine with two GPUs."""
    row = "NVIDIA H200, 143771 MiB, 143000 MiB, 580.95.05, 9.0"
    header = "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |"
    executable(tmp_path / "nvidia-smi", f"[ $# = 0 ] && echo '{header}' || printf '%s\\n' '{row}' '{row}'")
    monkeypatch.setattr("launcher.doctor.this_host._read_torch_cuda_version", lambda: "12.8")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("launcher.scu_train.MIN_FREE_GIB", 0.001)
    monkeypatch.setattr("launcher.doctor.this_host.MAMBA", ("no-mamba-ssm",))
    assert check_requirements(tmp_path / "out") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "optional no-mamba-ssm not installed; only models with Mamba layers use them" in shown
    assert "OK GPU 1 NVIDIA H200, 143000 MiB of 143771 MiB free, compute capability 9.0, driver" in shown
    assert "OK packages" in shown and "GiB free at" in shown and shown.endswith(" 0 FAIL")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("driver", "FAIL driver nvidia-smi: NVIDIA-SMI has failed"),
        ("disk", "FAIL disk: output_dir"),
        ("package", "FAIL no-such-package not installed fix: pip install 'no-such-package>=1'"),
        ("version", "FAIL pyyaml"),
        ("memory", "WARN GPU 0 at least 8 GB of GPU memory is needed"),
        ("capability", "WARN GPU 0 compute capability 7.0 or newer is needed"),
        (
            "CUDA",
            "FAIL CUDA torch was built for CUDA 13.0, but the driver supports at most 12.4 fix: update the driver",
        ),
        ("CUDA of torch", "FAIL CUDA this torch was built without CUDA"),
    ],
)
def test_missing_requirements_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str, line: str
) -> None:
    failing = "[ $# = 0 ] && exit 9; echo NVIDIA-SMI has failed; exit 9"
    memory, capability = 6144 if missing == "memory" else 24576, "6.1" if missing == "capability" else "8.6"
    row = f"RTX 3090, {memory} MiB, {memory} MiB, 580, {capability}"
    card = f"[ $# = 0 ] && echo 'CUDA Version: 12.4' || echo '{row}'"
    executable(tmp_path / "nvidia-smi", failing if missing == "driver" else card)
    cuda = None if missing == "CUDA of torch" else "13.0" if missing == "CUDA" else "12.1"
    monkeypatch.setattr("launcher.doctor.this_host._read_torch_cuda_version", lambda: cuda)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("launcher.scu_train.MIN_FREE_GIB", 1e9 if missing == "disk" else 0.001)
    if missing in ("package", "version"):
        wanted = "no-such-package>=1" if missing == "package" else "pyyaml>=99"
        project = tmp_path / "pyproject.toml"
        project.write_text(f"[project]\ndependencies = ['{wanted}']\n[project.optional-dependencies]\ngpu = []\n")
        monkeypatch.setattr("launcher.doctor.this_host.PYPROJECT_FILE", project)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert check_requirements(tmp_path) == (1 if line.startswith("FAIL") else 0)
    assert line in " ".join(capsys.readouterr().out.split())


def test_the_check_imports_no_torch() -> None:
    program = (
        "import sys; from launcher.scu_train import run; run(['--check-requirements'])\n"
        "print({'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "set()"


@pytest.mark.slow
def test_a_test_run_trains_and_leaves_its_log(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), write_chats(tmp_path / "text.jsonl", 60)
    flags = [
        "--test-run",
        "--model",
        str(model),
        "--data",
        str(data),
        "--control-frequency",
        "2",
        "--output-dir",
        "out",
    ]
    result = zerolora("scu-train", *flags, f"dataset.cache_dir={tmp_path}/cache", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    out = tmp_path / "out"
    log, link = out / "logs" / LOG, tmp_path / "logs" / LOG
    assert "step 10/10" in log.read_text() and log.read_text() in result.stdout
    assert link.is_symlink() and link.samefile(log)
    assert (
        f"equivalent command: zerolora train out/logs/scu-train.yaml dataset.cache_dir={tmp_path}/cache"
        in result.stdout
    )
    steps = [record["step"] for record in json.loads((out / "scu_metrics.json").read_text())]
    assert steps == [2, 4, 6, 8, 10]
    names = {path.name for path in out.iterdir()}
    assert {"adapter_model.safetensors", "training_config.json", "scu_config.json", "scu_history.json"} <= names
    assert {"checkpoint-5", "checkpoint-10"} <= names
    assert "lambda may" not in result.stdout + result.stderr, "a warning about default gains"

    # As the guide resumes: everything that is not given comes from the run, the output folder included.
    wrong = zerolora("scu-train", "--resume-from-checkpoint", "./out/checkpoint-7", "--max-steps", "12", cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    assert (
        "--resume-from-checkpoint=out/checkpoint-7" in wrong.stderr
        and "use out/checkpoint-5 or out/checkpoint-10" in wrong.stderr
    )
    resumed = zerolora(
        "scu-train", "--resume-from-checkpoint", "./out/checkpoint-10", "--max-steps", "12", cwd=tmp_path
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    steps = [record["step"] for record in json.loads((out / "scu_metrics.json").read_text())]
    assert steps == [2, 4, 6, 8, 10, 12]
    settings = json.loads((out / "training_config.json").read_text())
    assert (settings["base_model"], settings["dataset"]["path"]) == (str(model), str(data))
    assert (settings["training"]["max_steps"], settings["training"]["batch_size"]) == (12, 2)
    assert not (tmp_path / "granite_1b_cuda_output").exists()


def zerolora(*arguments: str, cwd: Path = CHECKOUT) -> "subprocess.CompletedProcess[str]":
    return run([sys.executable, "-m", "launcher.cli", *arguments], cwd)


def test_a_folder_that_takes_no_log_is_named_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where the folder should be")
    result = zerolora("scu-train", "--test-run", "--model", str(tmp_path), "--output-dir", "out", cwd=tmp_path)
    assert result.returncode == 2 and "output_dir=out: out is a file; use another folder" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_log_is_in_the_folder_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link follows the newest run; where it cannot be made there is none, and no file of the user's is replaced."""
    monkeypatch.chdir(tmp_path)
    for run_dir in (Path("a"), Path("b/c")):
        scu_flags.open_log(run_dir).close()
        assert Path("logs", LOG).is_symlink() and Path("logs", LOG).samefile(run_dir / "logs" / LOG)
    Path("logs", LOG).unlink()
    for run_dir in (Path("."), Path("d")):
        scu_flags.open_log(run_dir).close()
        assert (run_dir / "logs" / LOG).is_file() and not Path("logs", LOG).is_symlink()


GRANITE = (
    "random:granite-4.0-h-1b,num_hidden_layers=2,layer_types=null,hidden_size=64,vocab_size=300,"
    "shared_intermediate_size=64,num_attention_heads=4,num_key_value_heads=2,mamba_n_heads=8,mamba_d_head=16"
)


def start_of_ranks(launcher: str) -> list[str]:
    """What docs/lab/scu.md has before the flags, on a port of its own where other tests' ranks could have the usual."""
    scripts, port = Path(sys.executable).parent, f"--master_port={find_free_port()}"
    module = ["-m", "trainer.scu_train"]
    older = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", port, *module]
    return {
        "torch.distributed.launch": older,
        "torchrun": [str(scripts / "torchrun"), "--nproc_per_node", "2", port, *module],
        "deepspeed": [str(scripts / "deepspeed"), "--num_gpus", "2", port, "--module", "trainer.scu_train"],
        "mpirun": ["mpirun", "-np", "2", "--oversubscribe", str(scripts / "zerolora-scu-rank")],
    }[launcher]


@pytest.mark.parametrize(
    "launcher",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch.distributed.launch", "torchrun")),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("deepspeed", "mpirun")),
    ],
)
def test_granite_under_the_scu_by_ranks_that_others_start(tmp_path: Path, launcher: str) -> None:
    if launcher == "mpirun":
        needs_programs("mpirun")
    model, data = GRANITE, tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": f"{number} of many words " * 40}) + "\n" for number in range(8)))
    flags = ["--test-run", "--max-steps=3", "--multi-gpu", "--control-frequency=1", "--output-dir=out"]
    files = [f"--model={model}", f"--data={data}", f"dataset.cache_dir={tmp_path}/cache"]
    result = run([*start_of_ranks(launcher), *flags, *files], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    records = json.loads((tmp_path / "out" / "scu_metrics.json").read_text())
    assert [record["step"] for record in records] == [1, 2, 3] and records[2]["param_bpt"] > 0
    log = (tmp_path / "out" / "logs" / "rank-0.log").read_text()
    assert "world        2 ranks" in log and "mamba: 2 layers" in log and "cut to" not in log
    assert "step 3/3" in (tmp_path / "out" / "logs" / LOG).read_text()


@pytest.mark.parametrize("flag", ["--batchsize=8", "--target-s=2", "--dry-run"])
def test_a_rank_with_a_bad_flag_is_one_line_and_2(tmp_path: Path, flag: str) -> None:
    result = run([sys.executable, "-m", "trainer.scu_train", "--local-rank=0", "--data=x.jsonl", flag], tmp_path)
    assert result.returncode == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_says_nothing_of_a_bad_flag_lets_the_first_speak(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer.scu_train", "--data=x.jsonl", "--batchsize=8"]
    began = time.monotonic()
    result = run(["env", "RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", *command], tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")
    assert time.monotonic() - began >= EXIT_DELAY_S


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "mpirun"])
def test_ranks_that_others_start_say_what_is_wrong_with_a_flag(tmp_path: Path, launcher: str) -> None:
    """torchrun and mpirun end all ranks with the first that ends: that is not one that says nothing."""
    if launcher == "mpirun":
        needs_programs("mpirun")
    result = run([*start_of_ranks(launcher), "--data=x.jsonl", "--batchsize=8"], tmp_path)
    assert result.returncode != 0
    shown = result.stdout + result.stderr
    line = (
        "error: --batchsize: not an option of this command; did you mean --batch-size? See `zerolora scu-train --help`"
    )
    assert shown.count(line) == 1
    assert list(tmp_path.iterdir()) == []


def run(command: list[str], cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "DS_ACCELERATOR": "cpu", "COLUMNS": "120"}
    # Open MPI refuses root otherwise.
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
