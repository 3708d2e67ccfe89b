"""README.md: its commands run as written, in order, in a folder with the record that it shows."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, environment
from tests.tiny import make_model
from tests.tutorials import last_step

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RECORDS = 60
PATIENCE_S = 900
# What differs from the README: fewer steps, and no hub or cluster.
CHANGED = {
    "zerolora train my.yaml": " training.max_steps=4",
    "zerolora train my.yaml training.resume_from_checkpoint=latest": " training.max_steps=5",
    "zerolora submit my.yaml --nodes 4 --gpus-per-node 8 --time 12:00:00": " --dry-run",
    "zerolora chat runs/my": " --max-new-tokens 4 <<< 'Which port?'",
    "zerolora push runs/my OWNER/NAME": " --dry-run",
}
# What another test runs.
ELSEWHERE = {
    "make setup": "the environment of this test",
    ". .venv/bin/activate": "the environment of this test",
    "make demo": "tests/unit/test_demo.py",
    "zerolora doctor": "tests/cluster/test_doctor.py",
    "zerolora train my.yaml --launcher hostfile --hostfile hosts": "tests/cluster/test_ssh.py",
    "zerolora status JOB": "tests/cluster/test_tutorial.py",
    "deepspeed --no_python zerolora-rank my.yaml": "tests/unit/test_foreign_files.py",
    "zerolora eval runs/my --tasks gsm8k": "tests/distributed/test_evaluation_tasks.py",
    "zerolora serve runs/my": "tests/servers/test_serve.py",
}


def read_commands() -> list[str]:
    """Return the commands of the README in order, without their comments."""
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^    ((?:zerolora|deepspeed|make|\.) .*)", text, re.MULTILINE)
    inline = re.findall(r"`(zerolora estimate [^`]*)`", text)
    return [re.sub(r"\s+#.*", "", line).rstrip() for line in lines] + inline


def test_what_is_left_out_is_tested_elsewhere() -> None:
    assert {*ELSEWHERE, *CHANGED} <= set(read_commands())
    assert [name for name in ELSEWHERE.values() if name.startswith("tests/") and not (ROOT / name).exists()] == []


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_commands_of_the_readme_work_in_order(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (record,) = re.findall(r"^```json\n(.*)\n```", readme, re.MULTILINE)
    (tmp_path / "my.jsonl").write_text(f"{record}\n" * RECORDS)
    make_model(tmp_path / "model")
    commands = [command + CHANGED.get(command, "") for command in read_commands() if command not in ELSEWHERE]
    script = "\n".join(["set -ex", *commands]).replace(MODEL, "./model")
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert last_step(tmp_path / "runs" / "my") == 5
    assert (tmp_path / "runs" / "my" / "merged" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_configuration_of_the_readme_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my.yaml").write_text(text)
    command = ["zerolora", "validate", "my.yaml", "--settings-only"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
