"""The console: zerolora's lines reach the user, everything else ends in the rank's log."""

import io
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from trainer.monitor.console import Output

ROOT = Path(__file__).resolve().parents[2]
CHATTER = """
import ctypes, logging, os, subprocess, sys, threading, warnings
print("a print")
sys.stderr.write("a stderr line\\n")
warnings.warn("a warning")
logging.getLogger("deepspeed").warning("a log record")
os.write(1, b"bytes from C++\\n")
subprocess.run(["echo", "a child"])
"""


def script(run_dir: Path, body: str, *, rank: int = 0, path: str | None = None, options: str = "") -> list[str]:
    """A process that opens the console before anything else and then runs `body`."""
    opening = (
        "import trainer.monitor.console as module\nfrom pathlib import Path\n"
        f"console = module.open_console(Path({str(run_dir)!r}), {rank}, {path!r}{options})\n"
    )
    return [sys.executable, "-c", opening + body]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def log_of(run_dir: Path, rank: int = 0) -> str:
    return (run_dir / "logs" / f"rank-{rank}.log").read_text()


def test_chatter_goes_to_the_log_and_own_lines_to_stdout(tmp_path: Path) -> None:
    finished = run(script(tmp_path, CHATTER + "console.print('an own line')"))
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "an own line\n", "")
    log = log_of(tmp_path)
    for text in ("a print", "a stderr line", "a warning", "a log record", "bytes from C++", "a child"):
        assert text in log, text
    assert "an own line" not in log


def test_other_ranks_say_nothing_on_stdout(tmp_path: Path) -> None:
    finished = run(script(tmp_path, "console.print('from rank 1')", rank=1))
    assert (finished.stdout, finished.stderr) == ("", "")
    assert "from rank 1" in log_of(tmp_path, rank=1)


@pytest.mark.parametrize(
    "body",
    [
        "raise RuntimeError('boom')",
        "t = threading.Thread(target=lambda: exec(\"raise RuntimeError('boom')\")); t.start(); t.join()",
    ],
    ids=["main", "thread"],
)
def test_uncaught_exceptions_end_in_the_log(tmp_path: Path, body: str) -> None:
    finished = run(script(tmp_path, "import threading\n" + body))
    assert (finished.stdout, finished.stderr) == ("", "")
    log = log_of(tmp_path)
    assert "Traceback" in log and "RuntimeError: boom" in log


def test_a_crash_of_the_interpreter_leaves_its_stack_in_the_log(tmp_path: Path) -> None:
    finished = run(script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"))
    assert finished.returncode == -11
    assert "Segmentation fault" in log_of(tmp_path)


def test_a_later_run_appends_to_the_log(tmp_path: Path) -> None:
    for word in ("first", "second"):
        run(script(tmp_path, f"print({word!r})"))
    log = log_of(tmp_path)
    assert log.index("first") < log.index("second")
    assert log.count("== 2") == 2  # a heading with the date for each


def test_a_file_counts_as_a_terminal_of_the_width_given(tmp_path: Path) -> None:
    target = tmp_path / "console"
    body = "console.print('[red]x[/red] ' + str(console.width) + str(console.is_terminal))\nconsole.rule()"
    finished = run(script(tmp_path, body, path=str(target), options=", width=57, terminal=True"))
    assert finished.stdout == ""
    assert "\x1b[31mx\x1b[0m 57True" in target.read_text()
    assert "─" * 57 in target.read_text() and "─" * 58 not in target.read_text()


def test_a_plain_file_is_no_terminal_and_is_appended_to(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    target.write_text("before\n")
    run(script(tmp_path, "console.print('[red]after[/red]')", path=str(target)))
    assert target.read_text() == "before\nafter\n"


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    body = "console.print('one')\ninput()\nconsole.print('two')\nconsole.print('three')"
    command = script(tmp_path, body, path=str(writer))
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[writer])
    os.close(writer)
    assert os.read(reader, 100) == b"one\n"
    os.close(reader)
    process.communicate(b"\n", timeout=300)
    assert process.returncode == 0
    assert log_of(tmp_path).endswith("two\nthree\n")


def test_a_real_terminal_keeps_its_width_and_colours(tmp_path: Path) -> None:
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (30, 91))
    body = "console.print('[red]x[/red]', console.width, console.is_terminal)"
    environment = os.environ | {"TERM": "xterm-256color"}
    subprocess.run(
        script(tmp_path, CHATTER + body), cwd=ROOT, stdout=secondary, timeout=300, check=True, env=environment
    )
    os.close(secondary)
    assert os.read(primary, 4096).decode() == "\x1b[31mx\x1b[0m 91 True\r\n"
    os.close(primary)


OUTPUT = """
import os
from trainer.monitor.console import Output
output = Output(console, is_main={main}, verbose={verbose})
output("a detail")
output.print_always("a summary")
output("warning: a [plain] problem")
output("[yellow]warning:[/yellow] a problem")
output.is_starting = False
output("a result")
output.repeat_warnings()
"""
WARNINGS = ["warning: a [plain] problem", "warning: a problem"]
ENDED = ["a result", "2 warnings in this run:", *WARNINGS]


@pytest.mark.parametrize("verbose", [False, True])
def test_details_before_the_first_step_are_in_the_log_and_on_the_console_if_asked(
    tmp_path: Path, verbose: bool
) -> None:
    finished = run(script(tmp_path, OUTPUT.format(main=True, verbose=verbose)))
    everything = ["a detail", "a summary", *WARNINGS, *ENDED]
    assert finished.stdout.splitlines() == everything[0 if verbose else 1 :], finished.stderr
    assert log_of(tmp_path).splitlines()[1:] == everything
    assert run(script(tmp_path / "1", OUTPUT.format(main=False, verbose=verbose))).stdout == ""
    assert log_of(tmp_path / "1").count("\n") == 1


def test_other_adapters_of_a_run_show_only_warnings_before_the_first_step(tmp_path: Path) -> None:
    body = OUTPUT.format(main=True, verbose=False).replace("output(", "output.shows_start = False\noutput(", 1)
    assert run(
        script(tmp_path, body + "output.shows_start = True\noutput.print_always('a result')")
    ).stdout.splitlines() == [
        *WARNINGS,
        "a result",
        "a result",
    ]


def test_a_line_is_once_in_the_log_that_replaces_a_lost_console(tmp_path: Path) -> None:
    lost = "reader, writer = os.pipe()\nos.close(reader)\nos.dup2(writer, console.file.fileno())\n"
    run(script(tmp_path, "import os\n" + lost + OUTPUT.format(main=True, verbose=False)))
    lost = "cannot write to standard output any more; training continues without it"
    lines = log_of(tmp_path).splitlines()[1:]
    assert lines.count(lost) == 1
    lines.remove(lost)
    assert lines == ["a detail", "a summary", *WARNINGS, *ENDED]


def test_many_warnings_are_repeated_in_part(tmp_path: Path) -> None:
    body = (
        "output = module.Output(console, is_main=True, verbose=False)\n"
        "for number in range(12):\n    output(f'warning: {number}')\n    output(f'warning: {number}')\n"
        "output.repeat_warnings()"
    )
    lines = run(script(tmp_path, body)).stdout.splitlines()
    shown = [f"warning: {number}" for number in range(10)]
    assert lines[24:] == ["12 warnings in this run:", *shown, "... and 2 more, in logs/rank-0.log"]


def test_warnings_are_yellow_on_a_terminal() -> None:
    shown = io.StringIO()
    output = Output(Console(file=shown, force_terminal=True, color_system="standard"), is_main=True, verbose=False)
    output("warning: few records")
    assert "\x1b[33mwarning:\x1b[0m few records" in shown.getvalue()


def test_warnings_of_zerolora_stay_on_one_line_with_their_brackets(tmp_path: Path) -> None:
    message = "dataset.path=[x]: " + "long " * 60
    finished = run(script(tmp_path, f"module.warn(console, {message!r})"))
    assert finished.stdout.rstrip() == f"warning: {message}".rstrip()


def test_a_log_on_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    body = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    body += "for _ in range(50): print('a library prints')\nconsole.print('continues')"
    finished = run(script(tmp_path, body))
    assert (finished.returncode, finished.stdout) == (0, "continues\n")
    assert len(log_of(tmp_path)) <= 100
