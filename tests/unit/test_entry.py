"""Commands that end early: signals at any moment, a pipe without a reader, a full output."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.module import exec_module

CHECKOUT = Path(__file__).parents[2]
ZEROLORA = [sys.executable, "-m", "launcher.cli"]
MODULE = [sys.executable, "-m", "launcher.module", "victim"]
MAIN = "\ndef main(): pass\n"
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1"}
CONFIG = "base_model: some/model\noutput_dir: runs/x\ndataset: {path: data.jsonl}\n"
# What transformers does with an interrupt in the middle of an import; the worker inherits its parent's handlers.
VICTIM = """
import os, sys, time
kind = sys.argv[1]
if kind == "fork" and os.fork() == 0:
    os.write(1, b"forked\\n")  # Python forgets a signal that comes in the middle of a fork
    time.sleep(600)
try:
    os.write(1, b"ready\\n")  # a signal in the middle of a print would print it twice
    time.sleep(600)
except KeyboardInterrupt:
    if kind == "import":
        raise ModuleNotFoundError("Could not import module 'LlamaConfig'") from None
    if kind == "swallow":
        print("done")
        sys.exit(0)
    if kind == "cleanup":
        print("swept up")
    if kind == "deaf":
        os.write(1, b"heard\\n")
        time.sleep(600)
    raise
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "victim.py").write_text(VICTIM + MAIN)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


def start(command: list[str], folder: Path) -> "subprocess.Popen[str]":
    environment = ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "number", "code", "line"),
    [
        ("plain", signal.SIGINT, 130, "stopped"),
        ("plain", signal.SIGTERM, 143, "stopped by SIGTERM"),
        ("plain", signal.SIGUSR1, 75, "stopped by SIGUSR1"),
        ("import", signal.SIGINT, 130, "stopped"),
        ("swallow", signal.SIGINT, 130, "stopped"),
        ("cleanup", signal.SIGINT, 130, "stopped"),
    ],
)
def test_a_signal_is_one_line_whatever_becomes_of_it(
    folder: Path, kind: str, number: signal.Signals, code: int, line: str
) -> None:
    with start([*MODULE, kind], folder) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (code, f"{line}\n")
    assert out == {"swallow": "done\n", "cleanup": "swept up\n"}.get(kind, "")


def test_a_second_signal_ends_it_at_once(folder: Path) -> None:
    with start([*MODULE, "deaf"], folder) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "heard\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 130


def test_workers_that_a_library_has_forked_end_in_silence(folder: Path) -> None:
    """Ctrl-C in a terminal reaches all of them."""
    with start([*MODULE, "fork"], folder) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"ready\n", "forked\n"}
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "stopped\n")


# Sends SIGINT to the process that begins to import a module.
SITE = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STOP_AT"] and os.environ.get("STOP_IN", "") in " ".join(sys.orig_argv):
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "module", ["launcher.entry", "typer", "trainer.config", "launcher.commands", "torch", "trainer.model.base"]
)
def test_ctrl_c_while_something_is_imported_is_130_without_a_traceback(folder: Path, module: str) -> None:
    """In the command itself, or in the process that checks model and data below it."""
    (folder / "sitecustomize.py").write_text(SITE)
    environment = ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}", "STOP_AT": module}
    command = [*ZEROLORA, "train", "c.yaml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    # A shell says 130 of a process that SIGINT has ended, too.
    assert (done.returncode, done.stderr) in ((130, "stopped\n"), (-signal.SIGINT, ""))


@pytest.mark.parametrize("command", ["train", "validate"])
@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("dataset.path=none.jsonl", "dataset.path=none.jsonl: no such file or folder"),
        ("dataset.evaluation={path: none.jsonl}", "dataset.evaluation.path=none.jsonl: no such file or folder"),
        ("base_model=./none", "base_model=./none: no such folder"),
        ("output_dir=victim.py", "output_dir=victim.py: victim.py is a file"),
        ("output_dir=earlier", "output_dir=earlier: contains another run"),
    ],
)
def test_errors_found_without_the_model_are_reported_before_torch_is_imported(
    folder: Path, command: str, setting: str, line: str
) -> None:
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "earlier").mkdir()
    for name in ("training_config.json", "run.json"):
        (folder / "earlier" / name).write_text("{}")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}", "STOP_AT": "torch"}
    done = subprocess.run(
        [*ZEROLORA, command, "c.yaml", setting], cwd=folder, env=environment, capture_output=True, text=True
    )
    if (command, setting) == ("validate", "output_dir=earlier"):
        assert done.returncode == 130, "validate says so at its end"
        return
    assert done.returncode == 2 and f"error: {line}" in done.stderr, done.stderr


@pytest.mark.parametrize("command", ["estimate", "inspect", "prepare", "bench"])
def test_a_missing_configuration_is_reported_before_torch_is_imported(folder: Path, command: str) -> None:
    (folder / "sitecustomize.py").write_text(SITE)
    environment = ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}", "STOP_AT": "torch"}
    done = subprocess.run([*ZEROLORA, command, "n.yaml"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: n.yaml: no such file"), done.stderr


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_terminal_shows_what_is_done_until_something_is_printed(folder: Path, on_terminal: bool) -> None:
    """One line, which is then cleared; nothing of it appears in a pipe."""
    (folder / "victim.py").write_text("print('a result')" + MAIN)
    main_fd, side_fd = pty.openpty()
    environment = ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}", "TERM": "xterm"}
    with subprocess.Popen(
        MODULE, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=side_fd if on_terminal else subprocess.PIPE,
    ) as process:  # fmt: skip
        out, err = process.communicate(timeout=300)
    os.close(side_fd)
    shown = os.read(main_fd, 10_000) if on_terminal else err
    assert out == b"a result\n"
    assert shown == (b"\r\x1b[2Kimporting ...\r\x1b[2K" if on_terminal else b"")
    os.close(main_fd)


@pytest.mark.parametrize(("command", "below"), [("train", "trainer.train"), ("validate", "launcher.module")])
def test_ctrl_c_while_python_itself_starts_below_the_command_is_no_traceback(
    folder: Path, command: str, below: str
) -> None:
    (folder / "sitecustomize.py").write_text(SITE)
    environment = ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}", "STOP_AT": "runpy", "STOP_IN": below}
    done = subprocess.run([*ZEROLORA, command, "c.yaml"], cwd=folder, env=environment, capture_output=True, text=True)
    complaint = done.stderr.removeprefix(f"zerolora {command} ...\n")
    assert (done.returncode, complaint) in ((130, "stopped\n"), (130, ""), (-signal.SIGINT, ""))


@pytest.mark.parametrize("command", ["config --schema", "config c.yaml", "config --json-schema", "--help"])
def test_an_output_that_is_full_is_one_line_and_1(folder: Path, command: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*ZEROLORA, *command.split()], cwd=folder, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "error: standard output: No space left on device; the output is incomplete\n"


def test_a_closed_pipe_is_not_reported_as_an_error(folder: Path) -> None:
    (folder / "victim.py").write_text("for _ in range(10**6): print('line')" + MAIN)
    line = f"{' '.join(MODULE)} | head -1; echo ${{PIPESTATUS[0]}}"
    environment = ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}"}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("line\n141\n", "")


def test_a_closed_stdout_of_a_module_is_one_line_too(folder: Path) -> None:
    (folder / "victim.py").write_text("print('x' * 100_000)" + MAIN)
    environment = ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(MODULE, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr


def test_libraries_print_no_banners(folder: Path) -> None:
    """DeepSpeed warns on stdout that it finds no GPU."""
    (folder / "victim.py").write_text("from deepspeed.accelerator import get_accelerator; get_accelerator()" + MAIN)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "DS_ACCELERATOR"}
    environment |= {"PYTHONPATH": f"{CHECKOUT}:{folder}"}
    done = subprocess.run(MODULE, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_error_of_ours_keeps_its_traceback(folder: Path) -> None:
    (folder / "victim.py").write_text("raise ValueError('a bug')" + MAIN)
    done = subprocess.run(
        MODULE, env=ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}"}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "Traceback" in done.stderr and "a bug" in done.stderr


def test_an_unreadable_folder_is_one_line(folder: Path) -> None:
    """For any command that accesses a file there; root drops to the user nobody first."""
    (folder / "closed").mkdir(mode=0)
    victim = "import os, pathlib\nos.getuid() or os.setuid(65534)\npathlib.Path('closed/run.json').is_file()\n"
    (folder / "victim.py").write_text(victim + MAIN)
    environment = ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}"}
    done = subprocess.run(MODULE, cwd=folder, env=environment, capture_output=True, text=True)
    complaint = "error: closed/run.json: Permission denied; fix its permissions\n"
    assert (done.returncode, done.stderr) == (2, complaint)


@pytest.mark.parametrize("closed", ["run", "run/logs", "run/metrics.jsonl"])
def test_status_of_an_unreadable_folder(folder: Path, closed: str) -> None:
    """The launcher's own process, not one of its modules."""
    folder.chmod(0o755)
    (folder / "run" / "logs").mkdir(parents=True)
    (folder / "run" / "metrics.jsonl").touch()
    (folder / closed).chmod(0)
    code = "import os, sys; from launcher.commands import main; os.getuid() or os.setuid(65534); sys.exit(main())"
    words = [sys.executable, "-c", code, "status", "run"]
    done = subprocess.run(
        words, cwd=folder, env=ENVIRONMENT | {"PYTHONPATH": str(CHECKOUT)}, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith(f"error: {closed}"), done.stderr
    assert "Permission denied" in done.stderr and done.stderr.count("\n") == 1


def test_commands_do_not_spin_on_busy_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(os, "execv", lambda *_: seen.append(os.environ.get("OMP_WAIT_POLICY")))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    for given in (None, "active"):
        monkeypatch.setenv("OMP_WAIT_POLICY", given) if given else monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        exec_module("trainer.commands.evaluate", [])
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert seen == ["passive", "active"]


@pytest.mark.parametrize("words", ["validate ../c.yaml", "status ..", "--help"])
def test_a_deleted_working_folder_is_one_line(folder: Path, words: str) -> None:
    script = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -P -m launcher.cli {words}"
    environment = ENVIRONMENT | {"PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: the working directory was deleted; change to another folder\n")


def test_python_without_docstrings_is_one_line(folder: Path) -> None:
    environment = ENVIRONMENT | {"PYTHONOPTIMIZE": "2", "PYTHONPATH": str(CHECKOUT)}
    command = [*ZEROLORA, "generate", "--help"]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 2 and process.stderr.startswith("error: PYTHONOPTIMIZE=2 or -OO: removes docstrings")


def test_a_terminal_of_unknown_width_shows_help(folder: Path) -> None:
    environment = ENVIRONMENT | {"COLUMNS": "0", "PYTHONPATH": str(CHECKOUT)}
    process = subprocess.run(
        [*ZEROLORA, "report", "--help"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0 and "Usage: zerolora report" in process.stdout


def test_a_closed_input_is_empty(folder: Path) -> None:
    (folder / "victim.py").write_text("import sys\ndef main(): print('read', sys.stdin.isatty(), sys.stdin.read())\n")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{CHECKOUT}:{folder}"}
    command = ["bash", "-c", '"$@" <&-', "-", *MODULE]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.stdout.startswith("read False") and process.returncode == 0


def test_a_job_that_slurm_cannot_name_is_one_line(folder: Path) -> None:
    (folder / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    (folder / "scontrol").chmod(0o755)
    environment = ENVIRONMENT | {"PATH": str(folder), "PYTHONPATH": str(CHECKOUT)}
    process = subprocess.run([*ZEROLORA, "status", "123"], cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 2 and "job 123: unknown to scontrol (it fails, or SLURM forgot it)" in process.stderr
