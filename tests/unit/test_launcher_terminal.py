"""The descriptor, or the file, from rank 0 to the terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PROGRAM = r"""
import subprocess, sys
from launcher.supervision.terminal import restore_terminal, share_stdout
from launcher.targets.local import Command
rank = "import os, sys; os.write(int(sys.argv[1]), b'one line\\n\\x1b[?25lhalf a bar')"
command = Command((sys.executable, "-c", rank, str(share_stdout())), 1, {}, (), ({},))
[process] = command.start(subprocess.DEVNULL, subprocess.DEVNULL)
assert process.wait() == 0
restore_terminal()
"""
FOLLOWS = """
import sys, time
from pathlib import Path
from launcher.supervision.terminal import ConsoleFile
with ConsoleFile(Path(sys.argv[1])) as console:
    with open(console.path, "a") as rank:
        rank.write("before\\n")
    while console._shown < 7:
        pass
    logs = Path(sys.argv[1])
    logs.rename(logs.with_name("away"))
    time.sleep(1.0)
    logs.with_name("away").rename(logs)
    with open(console.path, "a") as rank:
        rank.write("after\\n")
"""


def test_a_rank_writes_to_the_terminal_which_is_restored() -> None:
    main_fd, side_fd = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=CHECKOUT, stdout=side_fd)
    os.close(side_fd)
    shown = b""
    try:
        while chunk := os.read(main_fd, 4096):
            shown += chunk
    except OSError:
        pass  # how Linux says that the other side has closed
    assert process.wait(timeout=300) == 0
    # A rank was killed while it showed a progress bar: its line is cleared, and the cursor is shown.
    assert shown == b"one line\r\n\x1b[?25lhalf a bar\r\x1b[2K\x1b[?25h"


def test_a_rank_writes_to_a_file_of_the_launcher(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as file:
        subprocess.run([sys.executable, "-c", PROGRAM], cwd=CHECKOUT, stdout=file, check=True, timeout=300)
    assert out.read_bytes() == b"one line\n\x1b[?25lhalf a bar"


def test_a_rank_is_told_the_width_of_the_terminal(tmp_path: Path) -> None:
    main_fd, side_fd = pty.openpty()
    program = FOLLOWS.partition("    with")[0] + "    print(console.build_arguments()[2:])"
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, cwd=CHECKOUT, env=os.environ | {"COLUMNS": "97"}, stdout=side_fd, check=True, timeout=300)
    assert b"['--console-width', '97', '--console-tty']" in os.read(main_fd, 4096)
    os.close(side_fd)
    os.close(main_fd)


def test_a_file_is_followed_where_its_server_was_away(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FOLLOWS, str(tmp_path / "logs")]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=True, timeout=300)
    assert (done.stdout, done.stderr) == (b"before\nafter\n", b"")
