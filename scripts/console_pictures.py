"""Pictures of docs/images, from the commands of docs/tutorials/first-run.md: `python -m scripts.console_pictures`.

The commands run as written, each on a terminal of its own, with the demo's model. The picture of the report is that of
the demo, taken by Chromium (`make system`). All take about five minutes on an idle machine.
"""

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from examples.demo import HUB_NAME, demo_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorials" / "first-run.md"
IMAGES = ROOT / "docs" / "images"
PICTURED = ("inspect", "train", "generate")
"""Subcommands that get a picture of that name."""
WIDTH, LINES = 108, 60

THEME = TerminalTheme(
    (26, 27, 38), (205, 208, 220),
    [(60, 62, 80), (240, 110, 120), (140, 200, 110), (230, 180, 90), (120, 160, 240), (190, 150, 240), (110, 200, 210),
     (205, 208, 220)],
)  # fmt: skip
# Without the rules that load a font from another site.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code, ", "")


def read_commands() -> list[str]:
    """Return the page's commands in order; a script within a command stays one."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [command for block in blocks for command in ([block] if "<<" in block else block.splitlines())]


def show_on_terminal(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a command on a terminal; return what it wrote there."""
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (LINES, WIDTH))
    with subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, stdin=secondary, stdout=secondary, stderr=secondary
    ) as process:
        os.close(secondary)
        written = b""
        while True:
            try:
                written += os.read(primary, 65536)
            except OSError:  # the last process on the terminal has ended
                break
    os.close(primary)
    text = written.decode(errors="replace")
    if process.returncode:
        raise SystemExit(f"{command}: exit code {process.returncode}\n{text}")
    return text


def visible_lines(written: str) -> list[str]:
    """Return the lines that stay on a terminal, with their colors: a carriage return overwrites what came before."""
    lines = []
    for line in re.sub(r"\x1b\[\??\d*[A-JKlh]", "", written).split("\n"):
        parts = [part for part in line.split("\r") if part.strip()]
        lines.append(parts[-1] if parts else "")
    return "\n".join(lines).strip("\n").split("\n")


def draw(command: str, lines: list[str]) -> str:
    """Return an SVG picture of a command and its output."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)
    return console.export_svg(title="", theme=THEME, code_format=FORMAT, unique_id=command.split()[1])


def make_hub_cache(folder: Path, cache: Path) -> None:
    """Make a Hub cache in which the demo's model has its published name."""
    repository = folder / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / revision).symlink_to(demo_model(cache))


def photograph(page: Path, image: Path) -> None:
    """Write the top of an HTML page as an image."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1030"]
    subprocess.run(["chromium", *options, f"--screenshot={image}", page.as_uri()], check=True, capture_output=True)


def main() -> int:
    """Run the commands and write their pictures."""
    cache = Path(os.environ.get("ZEROLORA_CACHE", "~/.cache/zerolora")).expanduser()
    with tempfile.TemporaryDirectory(prefix="console.") as place:
        make_hub_cache(Path(place) / "hub", cache)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        hub = {"HF_HOME": f"{place}/hub", "HF_HUB_OFFLINE": "1"}
        environment = {**os.environ, **hub, "PATH": path, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        work = Path(place) / "work"
        work.mkdir()
        for command in read_commands():
            print(command.split("\n")[0], flush=True)
            lines = visible_lines(show_on_terminal(command, work, environment))
            name = shlex.split(command)[1]
            if name in PICTURED:
                (IMAGES / f"{name}.svg").write_text(draw(command, lines))
        demo = f"zerolora train {ROOT}/configs/demo.yaml $(cd {ROOT} && {sys.executable} -m examples.demo)"
        show_on_terminal(demo, work, environment)
        photograph(work / "runs" / "demo" / "report.html", IMAGES / "report.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
