"""Figures that README and guides quote are those of docs/lab and its records."""

import pytest

from scripts.figures import ROOT, estimated_values, measured_values, quote, quoted, read_columns

FIGURES = read_columns()


@pytest.mark.parametrize("page", FIGURES["measured"])
def test_a_measured_figure_is_on_its_page_of_the_lab(page: str) -> None:
    text = (ROOT / "docs" / "lab" / page).read_text()
    assert [name for name, value in FIGURES["measured"][page].items() if value not in text] == []


@pytest.mark.parametrize("page", FIGURES["quotes"])
def test_a_page_quotes_the_measured_figures(page: str) -> None:
    assert quoted(page, measured_values()) == (ROOT / page).read_text(), "python -m scripts.figures"


@pytest.mark.slow
def test_the_readme_has_the_memory_of_the_estimate() -> None:
    estimated = estimated_values()
    assert len(estimated) == len(FIGURES["fits"])
    assert quoted("README.md", measured_values() | estimated) == (ROOT / "README.md").read_text(), (
        "python -m scripts.figures"
    )


def test_every_figure_is_quoted() -> None:
    names = {*measured_values(), *FIGURES["fits"]}
    templates = " ".join(template for templates in FIGURES["quotes"].values() for template in templates)
    assert [name for name in names if f"{{{name}}}" not in templates] == []


def test_only_the_figures_of_the_place_are_written() -> None:
    text = "9 of 1,234 tokens/s,\n5.6 GiB and 7 others"
    found = quote(text, "of {rate} tokens/s, {gib} GiB and {more}", {"rate": "99", "gib": "7"})
    assert found == "9 of 99 tokens/s,\n7 GiB and 7 others"
    with pytest.raises(ValueError, match=r"0 places read like: of \{rate\} images/s"):
        quote(text, "of {rate} images/s", {"rate": "1"})
