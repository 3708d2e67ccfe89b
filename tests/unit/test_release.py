"""The version is one in pyproject.toml, CITATION.cff and the changelog; the install guide has every extra."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_changelogs_and_the_citations() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [section for section in sections if section != "Unreleased"]
    assert sections.index(released[0]) <= 1
    assert re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", released[0])
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == version


def test_the_install_guide_has_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "guide" / "install.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(extras)
