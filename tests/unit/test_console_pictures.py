"""docs/images: the console pictures show the commands of the first tutorial, and need nothing from another site."""

import html
import re
from pathlib import Path

import pytest

from scripts.console_pictures import IMAGES, PICTURED, draw, read_commands, visible_lines

ROOT = Path(__file__).parents[2]


def text_of(svg: str) -> str:
    """The text of a picture, a line of the console in each of its lines."""
    rows: dict[str, str] = {}
    for row, text in re.findall(r'<text [^>]*?y="([\d.]+)"[^>]*>(.*?)</text>', svg):
        rows[row] = rows.get(row, "") + html.unescape(text).replace("\xa0", " ")
    return "\n".join(rows.values())


@pytest.mark.parametrize("name", PICTURED)
def test_a_picture_shows_the_command_of_the_tutorial(name: str) -> None:
    (command,) = [each for each in read_commands() if each.startswith(f"zerolora {name} ")]
    svg = (IMAGES / f"{name}.svg").read_text()
    assert text_of(svg).startswith(f"$ {command}\n"), "python -m scripts.console_pictures"
    assert "url(http" not in svg and "@font-face" not in svg


def test_pages_show_every_picture() -> None:
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*/*.md")])
    assert [file.name for file in IMAGES.iterdir() if f"images/{file.name})" not in pages] == []


def test_lines_that_are_overwritten_on_a_terminal_are_not_in_the_picture() -> None:
    written = (
        "\r\x1b[2Kstarting ...\r\x1b[2Kready\r\n1/2 \x1b[32m--\x1b[0m\r\x1b[2Kstep 1\r\n\x1b[?25h\x1b[1mend\x1b[0m\r\n"
    )
    lines = visible_lines(written)
    assert lines == ["ready", "step 1", "\x1b[1mend\x1b[0m"]
    assert text_of(draw("zerolora train x.yaml", lines)) == "$ zerolora train x.yaml\nready\nstep 1\nend"
