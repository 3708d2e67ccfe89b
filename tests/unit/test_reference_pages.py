"""docs/reference: what is written from the code is what the code says, and no link of docs/ leads nowhere."""

import re
from pathlib import Path

import pytest

from scripts.reference_pages import command_names, commands_page, helps, settings_page

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])


def test_the_settings_are_those_of_the_code() -> None:
    written = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert written == settings_page(), "python -m scripts.reference_pages"


def test_every_command_has_its_chapter_in_order() -> None:
    written = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert re.findall(r"^## zerolora ([\w-]+)$", written, re.MULTILINE) == command_names()


def test_the_commands_are_described_as_they_describe_themselves() -> None:
    written = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert written == commands_page(helps()), "python -m scripts.reference_pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target.split("#")[0]).exists()]
    assert missing == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert [page for path in docs.rglob("*.md") if (page := str(path.relative_to(docs))) not in navigation] == []
