"""The HTML of a report: one file that needs no other, readable in a browser, a mail or a printout."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

STYLE = """
:root { --ink: #27303d; --soft: #5b6675; --line: #e3e7ed; --paper: #ffffff; --ground: #f5f7fa; --accent: #2f6db3; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 48px; }
h1 { margin: 0; font-size: 27px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 0 0 10px; font-size: 15px; color: var(--accent); }
header p { margin: 2px 0 0; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin: 24px 0 14px; }
.tile, section, figure { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 14px 18px; }
.tile span { display: block; color: var(--soft); font-size: 13px; }
.tile b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.plots, .summary { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; padding: 14px; }
figure:first-child { grid-column: 1 / -1; }
figure img { display: block; width: 100%; height: auto; }
.summary { margin-top: 14px; }
section { padding: 16px 18px; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: 5px 0; border-top: 1px solid var(--line); text-align: left; vertical-align: top; }
tr:first-child th, tr:first-child td { border-top: 0; }
th { width: 170px; padding-right: 16px; color: var(--soft); font-weight: normal; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
@media print { body { background: none; } figure, section { break-inside: avoid; } }
""".strip()


@dataclass(frozen=True)
class Tile:
    """A number in large type, what it is, and a word on it."""

    label: str
    value: str
    note: str


def render_page(
    title: str,
    subtitle: str,
    tiles: Sequence[Tile],
    groups: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    plots: Mapping[str, Path],
) -> str:
    """The page as text; the PNG files of `plots` (title -> file) are embedded, all texts are escaped."""
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>",
        f'<div class="tiles">{"".join(map(_tile, tiles))}</div>',
        f'<div class="plots">{"".join(_figure(name, path) for name, path in plots.items())}</div>',
        f'<div class="summary">{"".join(_table(name, rows) for name, rows in groups)}</div>',
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _tile(tile: Tile) -> str:
    label, value, note = escape(tile.label), escape(tile.value), escape(tile.note)
    return f'<div class="tile"><span>{label}</span><b>{value}</b><span>{note}</span></div>'


def _figure(name: str, path: Path) -> str:
    image = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<figure><img alt="{escape(name)}" src="data:image/png;base64,{image}"></figure>'


def _table(name: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows)
    return f"<section><h2>{escape(name)}</h2><table>{lines}</table></section>"
