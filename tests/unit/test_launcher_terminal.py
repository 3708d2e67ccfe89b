"""The pipe, or the file, from rank 0 to the terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PROGRAM = """
import os
from pathlib import Path
from launcher.supervision.terminal import ConsolePipe
with ConsolePipe(Path()) as pipe:
    with open(pipe.path, "w") as rank:
        print("arguments", pipe.arguments()[2:], file=rank)
        rank.write("\\x1b[?25lhalf a bar")
assert not os.path.exists(pipe.path)
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


def test_ranks_know_the_terminal_and_it_is_restored() -> None:
    main_fd, side_fd = pty.openpty()
    environment = os.environ | {"COLUMNS": "97"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=CHECKOUT, env=environment, stdout=side_fd)
    os.close(side_fd)
    shown = b""
    try:
        while chunk := os.read(main_fd, 4096):
            shown += chunk
    except OSError:
        pass  # how Linux says that the other side has closed
    assert process.wait(timeout=300) == 0
    assert b"['--console-width', '97', '--console-tty']" in shown
    # A rank was killed while it showed a progress bar: the cursor is restored and the prompt gets its own line.
    assert shown.endswith(b"half a bar\x1b[?25h\r\n")


def test_a_file_is_no_terminal(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as file:
        subprocess.run([sys.executable, "-c", PROGRAM], cwd=CHECKOUT, stdout=file, check=True, timeout=300)
    assert out.read_bytes() == b"arguments []\n\x1b[?25lhalf a bar"


def test_a_closed_output_does_not_stop_the_run(tmp_path: Path) -> None:
    program = PROGRAM.replace('"half a bar"', '"half a bar" * 100_000') + f"\nopen({str(tmp_path / 'done')!r}, 'w')\n"
    reader, writer = os.pipe()
    os.close(reader)
    subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, stdout=writer, check=True, timeout=300)
    os.close(writer)
    assert (tmp_path / "done").exists()


def test_a_file_is_followed_where_its_server_was_away(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FOLLOWS, str(tmp_path / "logs")]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=True, timeout=300)
    assert (done.stdout, done.stderr) == (b"before\nafter\n", b"")
