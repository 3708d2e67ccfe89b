"""The HTML of a report: one self-contained file for a browser, an email or a printout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from urllib.parse import quote

from trainer.monitor.report.sample_images import EmbeddedImage

STYLE = """
:root { color-scheme: light dark; --ink: #27303d; --soft: #5b6675; --line: #e3e7ed; --paper: #ffffff;
        --ground: #f5f7fa; --blue: #2f6db3; --orange: #c96f15; --green: #2f8460;
        --violet: #8a4fa0; --red: #b5473c; --olive: #74761a; --teal: #16838f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa6b5; --line: #323b47; --paper: #1c222a; --ground: #12161b;
          --blue: #6ea8e8; --orange: #f0a050; --green: #62c296;
          --violet: #c79be0; --red: #ee8c80; --olive: #c3c55a; --teal: #5cc6d2; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 48px; }
h1 { margin: 0; font-size: 27px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 0 0 8px; font-size: 15px; }
h2 small { color: var(--soft); font-weight: normal; font-size: 12.5px; }
header p { margin: 2px 0 0; color: var(--soft); overflow-wrap: anywhere; }
a { color: var(--blue); }
code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 14px; margin-top: 24px; }
.tile, section, figure { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; min-width: 0; }
.tile { padding: 14px 18px; }
.tile span { display: block; color: var(--soft); font-size: 13px; }
.tile b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(260px, 100%), 1fr)); gap: 14px;
         margin-top: 14px; }
.summary { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 14px;
           margin-top: 14px; }
figure { margin: 0; padding: 14px 18px; display: flex; flex-direction: column; justify-content: space-between; }
.wide { grid-column: 1 / -1; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 8px; font-size: 12.5px; color: var(--soft); }
.legend span::before { content: ""; display: inline-block; width: 16px; height: 0; margin-right: 6px;
                       vertical-align: middle; border-top: 3px solid var(--c); }
.legend .pale::before { opacity: 0.4; }
.legend .dashed::before { border-top-style: dashed; border-top-width: 2px; }
.legend .dots::before { width: 8px; height: 8px; border: 0; border-radius: 50%; background: var(--c); }
.blue { --c: var(--blue); } .orange { --c: var(--orange); } .green { --c: var(--green); }
.run0 { --c: var(--blue); } .run1 { --c: var(--orange); } .run2 { --c: var(--green); } .run3 { --c: var(--violet); }
.run4 { --c: var(--red); } .run5 { --c: var(--olive); } .run6 { --c: var(--teal); } .run7 { --c: var(--soft); }
.chart { position: relative; height: 130px; margin: 8px 8px 26px 44px; font-size: 11.5px; color: var(--soft);
         font-variant-numeric: tabular-nums; }
.wide .chart { height: 270px; }
.chart svg { position: absolute; width: 100%; height: 100%; overflow: visible; }
.chart span { position: absolute; white-space: nowrap; }
.chart .y { right: 100%; padding-right: 7px; transform: translateY(-50%); }
.chart .x { top: 100%; padding-top: 5px; transform: translateX(-50%); }
path { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
path, .grid { vector-effect: non-scaling-stroke; }
path.pale { stroke-width: 1; opacity: 0.4; }
path.dashed { stroke-width: 1.3; stroke-dasharray: 2 5; opacity: 0.8; }
path.dots { stroke-width: 9; }
.grid { stroke: var(--line); stroke-width: 1; }
.band { fill: var(--orange); opacity: 0.15; }
section { padding: 16px 18px; }
.summary h2 { color: var(--blue); }
table { width: 100%; border-collapse: collapse; }
th, td { padding: 5px 0; border-top: 1px solid var(--line); text-align: left; vertical-align: top; }
tr:first-child th, tr:first-child td { border-top: 0; }
th { width: 150px; padding-right: 16px; color: var(--soft); font-weight: normal; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.wide-table { margin-top: 14px; overflow-x: auto; }
.wide-table thead th { color: var(--soft); border-top: 0; }
.wide-table td, .wide-table th { padding-right: 16px; width: auto; }
.numbers td, .numbers th { white-space: nowrap; }
.wide-table td, .wide-table code { overflow-wrap: normal; }
.wide-table i { display: inline-block; width: 16px; border-top: 3px solid var(--c); margin-right: 6px;
                vertical-align: middle; }
.bar { display: flex; height: 12px; margin: 4px 0 8px; border-radius: 3px; overflow: hidden; }
.bar i { background: var(--c); min-width: 1px; }
.swatch { display: inline-block; width: 10px; height: 10px; margin-right: 7px; border-radius: 2px;
          background: var(--c); }
.note { margin-top: 14px; overflow-wrap: anywhere; }
.warnings h2 { color: var(--orange); }
.note ul { margin: 0; padding-left: 20px; }
.example { max-height: 320px; overflow-y: auto; margin: 0; white-space: pre-wrap; color: var(--soft); }
mark { background: none; color: var(--green); font-weight: 600; }
details { margin-top: 10px; }
summary { cursor: pointer; color: var(--soft); }
.answers { margin-top: 14px; overflow-x: auto; }
.answers table { table-layout: fixed; min-width: calc(var(--columns) * 120px); }
.answers td, .answers th { width: auto; padding-right: 16px; white-space: pre-wrap; }
h3 { margin: 12px 0 2px; font-size: 14px; overflow-wrap: anywhere; }
.pictures { margin-top: 14px; }
.pictures div { display: flex; flex-wrap: wrap; gap: 14px; }
.pictures img { display: block; width: 224px; max-width: 100%; }
@media (max-width: 520px) {
  main { padding: 20px 12px 32px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 10px; }
  .tile { padding: 10px 12px; } .tile b { font-size: 16px; }
  .tile:last-child:nth-child(odd) { grid-column: 1 / -1; }
  .summary th { width: 108px; padding-right: 10px; }
  .few :is(td, th, code) { overflow-wrap: anywhere; }
  .few table { table-layout: fixed; }
  .few thead th:first-child { width: 42%; }
  .wide .chart { height: 200px; } }
@media print { body { background: none; } figure, section { break-inside: avoid; } }
""".strip()


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
