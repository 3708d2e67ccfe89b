"""The HTML of a report: one file that needs no other, readable in a browser, a mail or a printout."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

STYLE = """
:root { color-scheme: light dark; --ink: #27303d; --soft: #5b6675; --line: #e3e7ed; --paper: #ffffff;
        --ground: #f5f7fa; --blue: #2f6db3; --orange: #c96f15; --green: #2f8460; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa6b5; --line: #323b47; --paper: #1c222a; --ground: #12161b;
          --blue: #6ea8e8; --orange: #f0a050; --green: #62c296; } }
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
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 14px; margin: 24px 0 14px; }
.tile, section, figure { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; min-width: 0; }
.tile { padding: 14px 18px; }
.tile span { display: block; color: var(--soft); font-size: 13px; }
.tile b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(260px, 100%), 1fr)); gap: 14px; }
.summary { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 14px;
           margin-top: 14px; }
figure { margin: 0; padding: 14px 18px; }
.wide { grid-column: 1 / -1; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 8px; font-size: 12.5px; color: var(--soft); }
.legend span::before { content: ""; display: inline-block; width: 16px; height: 0; margin-right: 6px;
                       vertical-align: middle; border-top: 3px solid var(--c); }
.legend .pale::before { opacity: 0.4; }
.legend .dashed::before { border-top-style: dashed; border-top-width: 2px; }
.legend .dots::before { width: 8px; height: 8px; border: 0; border-radius: 50%; background: var(--c); }
.blue { --c: var(--blue); } .orange { --c: var(--orange); } .green { --c: var(--green); }
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
.answers { margin-top: 14px; }
.answers td, .answers th { width: 50%; padding-right: 16px; white-space: pre-wrap; }
.answers h3 { margin: 12px 0 2px; font-size: 14px; overflow-wrap: anywhere; }
@media (max-width: 520px) {
  main { padding: 20px 12px 32px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 10px; }
  .tile { padding: 10px 12px; } .tile b { font-size: 16px; }
  .summary th { width: 108px; padding-right: 10px; }
  .wide .chart { height: 200px; } }
@media print { body { background: none; } figure, section { break-inside: avoid; } }
""".strip()


@dataclass(frozen=True)
class Tile:
    """A number in large type, what it is, and a word on it."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Answer:
    """A sample prompt, and what the model said to it before and after training."""

    prompt: str
    before: str
    after: str


def render_page(
    title: str,
    subtitle: str,
    tiles: Sequence[Tile],
    groups: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    figures: Sequence[str],
    *,
    answers: Sequence[Answer] = (),
    commands: Sequence[tuple[str, str]] = (),
    files: Sequence[str] = (),
) -> str:
    """The page as text; `figures` are HTML, all else is escaped. `files` lie beside the page."""
    tables = [_table(name, rows) for name, rows in groups]
    if commands:
        tables.append(_table("Next", commands, code=True))
    if files:
        links = ", ".join(f'<a href="{escape(quote(name))}">{escape(name)}</a>' for name in files)
        tables.append(f"<section><h2>Files</h2>{links}</section>")
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>",
        f'<div class="tiles">{"".join(map(_tile, tiles))}</div>',
        f'<div class="plots">{"".join(figures)}</div>',
        *([f'<section class="answers"><h2>Answers</h2>{"".join(map(_answer, answers))}</section>'] if answers else []),
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
    cells = f"<td>{escape(answer.before)}</td><td>{escape(answer.after)}</td>"
    return f"<h3>{escape(answer.prompt)}</h3><table><tr><th>before</th><th>after</th></tr><tr>{cells}</tr></table>"


def _table(name: str, rows: Sequence[tuple[str, str]], *, code: bool = False) -> str:
    values = [(key, f"<code>{escape(value)}</code>" if code else escape(value)) for key, value in rows]
    lines = "".join(f"<tr><th>{escape(key)}</th><td>{value}</td></tr>" for key, value in values)
    return f"<section><h2>{escape(name)}</h2><table>{lines}</table></section>"
