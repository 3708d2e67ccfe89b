"""Sentences of README, tutorials and guides are short, and pages and code avoid unusual words."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = [
    ROOT / "README.md",
    DOCS / "index.md",
    *sorted((DOCS / "tutorials").glob("*.md")),
    *sorted((DOCS / "guide").glob("*.md")),
]
LONGEST_SENTENCE = 35
"""In words; code and a formula between spaces count as one."""
# Plain words for them: reported, fix, next to, of which, exists, was deleted, continues.
DECODED = re.compile(r"\b(told|mend(s|ed|ing)?|beside|whose|is there|is gone|goes on)\b", re.IGNORECASE)
MAX_DECODED = 10


def sentences(markdown: str) -> list[str]:
    """Return the sentences of a page: no code blocks, tables or headings; a list item begins a new one."""
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(    |\||#|!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(?:[-*]|\d+\.) ", "\n", text, flags=re.MULTILINE)
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        found += re.split(r"(?<=[.!?])[*\")]*\s+(?=[A-Z(*\"~])", re.sub(r"`[^`]*`", "Code", plain))
    return found


def test_sentences_are_found_between_what_is_not_prose() -> None:
    page = "# A title\n\nOne `x y` is\nhere. Two\n\n```bash\nno prose\n```\n\n| a | b |\n\n"
    page += "- Three\n- [Four](x.md#y). `f` is five.\n"
    assert [each for each in sentences(page) if each] == ["One Code is here.", "Two", "Three", "Four.", "Code is five."]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    assert [each for each in sentences(page.read_text()) if len(each.split()) > LONGEST_SENTENCE] == []


@pytest.mark.parametrize("kind", ["md", "py"])
def test_words_are_plain(kind: str) -> None:
    tracked = subprocess.run(["git", "ls-files", f"*.{kind}"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in tracked.stdout.split() if (ROOT / name).exists() and ROOT / name != Path(__file__)]
    assert len(files) > 50
    found = [f"{name}: {match[0]}" for name in files for match in DECODED.finditer((ROOT / name).read_text())]
    assert len(found) <= MAX_DECODED, found
