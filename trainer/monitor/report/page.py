"""The HTML of a report: one self-contained file for a browser, an email or a printout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from trainer.monitor.report.sample_images import EmbeddedImage

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8").strip()
Example = tuple[str, list[tuple[float, str]]]
"""A training example: its heading, and its parts, each with its weight in the loss."""
SHORT_PHASE = 0.01
"""Phases below this fraction of the time are shown as one."""


@dataclass(frozen=True)
class Tile:
    """A number in large type with a label and a note."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Answer:
    """A sample prompt and its answers, by column: before and after training, or one per run."""

    prompt: str
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Changed:
    """A setting that differs from its default."""

    name: str
    value: str
    default: str


@dataclass(frozen=True)
class Settings:
    """The settings of a run: those that differ from their defaults, and all of them as YAML."""

    changed: Sequence[Changed]
    whole: str


def render_page(
    title: str,
    subtitle: str,
    tiles: Sequence[Tile],
    groups: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    figures: Sequence[str],
    *,
    answers: Sequence[Answer] = (),
    pictures: Sequence[tuple[str, Sequence[EmbeddedImage]]] = (),
    commands: Sequence[tuple[str, str]] = (),
    files: Sequence[str] = (),
    times: Mapping[str, float] = MappingProxyType({}),
    first: Sequence[str] = (),
    middle: Sequence[str] = (),
    details: Sequence[str] = (),
) -> str:
    """Return the page; all else than HTML is escaped.

    HTML are `first` (before the `figures`), `middle` (after the answers) and `details` (figures after that). `files`
    are in the folder of the page; `times` are seconds by phase.
    """
    tables = [_table(name, rows) for name, rows in groups]
    if times:
        tables.append(_times(times))
    if commands:
        tables.append(_table("Next", commands, code=True))
    if files:
        links = ", ".join(f'<a href="{escape(quote(name))}">{escape(name)}</a>' for name in files)
        tables.append(f"<section><h2>Files</h2>{links}</section>")
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>",
        f'<div class="tiles">{"".join(map(_tile, tiles))}</div>',
        *first,
        f'<div class="plots">{"".join(figures)}</div>',
        *([f'<section class="answers"><h2>Answers</h2>{"".join(map(_answer, answers))}</section>'] if answers else []),
        *(map(_pictures, pictures)),
        *middle,
        *([f'<div class="plots">{"".join(details)}</div>'] if details else []),
        f'<div class="summary">{"".join(tables)}</div>',
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(f'{title}: {subtitle}')}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _tile(tile: Tile) -> str:
    label, value, note = escape(tile.label), escape(tile.value), escape(tile.note)
    return f'<div class="tile"><span>{label}</span><b>{value}</b><span>{note}</span></div>'


def _answer(answer: Answer) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in answer.texts)
    cells = "".join(f"<td>{escape(text) or '<small>(nothing)</small>'}</td>" for text in answer.texts.values())
    table = f'<table style="--columns:{len(answer.texts)}"><tr>{heads}</tr><tr>{cells}</tr></table>'
    return f"<h3>{escape(answer.prompt)}</h3>{table}"


def _times(times: Mapping[str, float]) -> str:
    """Render a bar of the phases, longest first, and a table of their seconds."""
    whole = sum(times.values()) or 1.0
    short = {name for name, seconds in times.items() if seconds < SHORT_PHASE * whole}
    shown = {name: seconds for name, seconds in times.items() if name not in short}
    longest = sorted(shown.items(), key=lambda item: -item[1])
    if short:
        longest.append(("others", sum(times[name] for name in short)))
    parts = [(name, seconds, f"run{at % 8}") for at, (name, seconds) in enumerate(longest)]
    bar = "".join(
        f'<i class="{colour}" style="width:{100 * seconds / whole:.2f}%"></i>' for _, seconds, colour in parts
    )
    rows = "".join(
        f'<tr><th><span class="swatch {colour}"></span>{escape(name)}</th><td>{seconds:,.1f} s</td>'
        f"<td>{seconds / whole:.0%}</td></tr>"
        for name, seconds, colour in parts
    )
    return f'<section><h2>Time by phase</h2><div class="bar">{bar}</div><table>{rows}</table></section>'


def _settings(settings: Settings) -> str:
    rows = [(change.name, change.value, change.default) for change in settings.changed]
    table = wide_table("Settings that are not at their defaults", ("setting", "here", "default"), rows, code=True)
    whole = f"<details><summary>All settings</summary><pre><code>{escape(settings.whole)}</code></pre></details>"
    return table.replace("</section>", f"{whole}</section>")


def render_notes(settings: Settings | None, warnings: Sequence[str], examples: Sequence[Example]) -> list[str]:
    """Render a run's settings, warnings and training examples, where it has any."""
    lines = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    title = "<h2>Training examples <small>the highlighted part is trained</small></h2>"
    return [
        *([_settings(settings)] if settings else []),
        *([f'<section class="note warnings"><h2>Warnings</h2><ul>{lines}</ul></section>'] if warnings else []),
        *([f'<section class="note">{title}{"".join(map(_example, examples))}</section>'] if examples else []),
    ]


def _example(example: Example) -> str:
    """Render an example; its trained parts are marked, with their weight if it is not 1."""
    name, parts = example
    texts = [
        f"<mark>{f'{weight:g}: ' * (weight != 1)}{escape(text)}</mark>" if weight else escape(text)
        for weight, text in parts
    ]
    return f'<h3>{escape(name)}</h3><p class="example">{"".join(texts)}</p>'


MOST_ON_A_PHONE = 3
"""Tables of up to this many columns wrap on a phone; wider ones scroll."""


def wide_table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, code: bool = False, runs: bool = False
) -> str:
    """Render a table of full width; `code` formats all cells but the first as code, `runs` marks each row as a run."""
    mark = ("<code>", "</code>") if code else ("", "")
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join(
        f"<tr><th>{f'<i class=run{at}></i>' if runs else ''}{escape(first)}</th>"
        f"{''.join(f'<td>{mark[0]}{escape(cell)}{mark[1]}</td>' for cell in rest)}</tr>"
        for at, (first, *rest) in enumerate(rows)
    )
    kind = " numbers" if runs else " few" if len(heads) <= MOST_ON_A_PHONE else ""
    return (
        f'<section class="wide-table{kind}"><h2>{escape(title)}</h2>'
        f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></section>"
    )


def _pictures(row: tuple[str, Sequence[EmbeddedImage]]) -> str:
    prompt, pictures = row
    shown = "".join(
        f'<figure><img src="{picture.address}" alt="{escape(prompt)}"><figcaption>'
        f"{escape(picture.when)}</figcaption></figure>"
        for picture in pictures
    )
    return f'<section class="pictures"><h2>{escape(prompt)}</h2><div>{shown}</div></section>'


def _table(name: str, rows: Sequence[tuple[str, str]], *, code: bool = False) -> str:
    values = [(key, f"<code>{escape(value)}</code>" if code else escape(value)) for key, value in rows]
    lines = "".join(f"<tr><th>{escape(key)}</th><td>{value}</td></tr>" for key, value in values)
    return f"<section><h2>{escape(name)}</h2><table>{lines}</table></section>"
