"""docs/: pages written from the code are up to date, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from scripts.reference_pages import command_names, commands_page, helps, settings_page
from trainer.config import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])


def test_the_settings_are_those_of_the_code() -> None:
    written = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert written == settings_page(), "python -m scripts.reference_pages"


def test_every_command_has_its_chapter_in_order() -> None:
    written = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert re.findall(r"^## zerolora ([\w-]+)$", written, re.MULTILINE) == command_names()


def test_the_commands_are_described_as_they_describe_themselves() -> None:
    written, shown = (ROOT / "docs" / "reference" / "commands.md").read_text(), helps()
    assert written == commands_page(shown), "python -m scripts.reference_pages"
    assert [name for name, text in shown.items() if "bool" in text.lower()] == [], "a flag has no type"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target.split("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_a_heading_find_it(page: Path) -> None:
    missing = []
    for target, anchor in re.findall(r"\]\(([^)\s#]*\.md)?#([^)\s]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.+)$", (page.parent / target if target else page).read_text(), re.MULTILINE)
        if anchor not in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]:
            missing.append(f"{target}#{anchor}")
    assert missing == []


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
GUIDE = [ROOT / "README.md", ROOT / "docs" / "index.md", *TUTORIALS, *sorted((ROOT / "docs" / "guide").glob("*.md"))]
OTHER_OPTIONS = ("import", "ops", "sweep")
"""Commands that pass on options of other programs or subcommands."""


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_commands_of_the_guide_exist_with_their_options(page: Path) -> None:
    reference = (ROOT / "docs" / "reference" / "commands.md").read_text()
    known = dict(re.findall(r"^## zerolora (\S+)\n\n```text\n(.*?)```", reference, re.MULTILINE | re.DOTALL))
    text = page.read_text()
    fenced = "".join(re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    in_blocks = re.findall(r"^zerolora ([a-z][^#\n]*)", fenced, re.MULTILINE)
    in_blocks += re.findall(r"^    zerolora ([a-z][^#\n]*)", text, re.MULTILINE)
    in_text = re.findall(r"`zerolora ([a-z][^`]*)`", text.replace("\n", " "))
    wrong = []
    for command in in_blocks + in_text:
        name, *words = command.split()
        options = [word.partition("=")[0] for word in words if re.match(r"--\w", word)]
        if name not in known:
            wrong.append(command)
        elif name not in OTHER_OPTIONS:
            wrong += [f"{name} {option}" for option in options if option not in known[name] and option != "--help"]
    assert wrong == []


def test_the_configuration_in_the_readme_is_valid(tmp_path: Path) -> None:
    (found,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "c.yaml").write_text(found)
    assert load_config(tmp_path / "c.yaml").notes == ()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert [page for path in docs.rglob("*.md") if (page := str(path.relative_to(docs))) not in navigation] == []


def test_the_readme_fits_on_few_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 180 and max(map(len, lines)) <= 120
