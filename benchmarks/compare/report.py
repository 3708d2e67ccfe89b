"""Table of a comparison, its conclusions, and its files: compare.md, compare.csv, compare.json."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.compare.results import CONFIDENCE, Comparison, Interval
from benchmarks.compare.trials import Setting

Row = dict[str, Any]


def _number(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else f"{row[name]:{form}}"


def _interval(name: str, sign: str = "") -> Callable[[Row], str]:
    return lambda row: row[name].text(sign) if row[name] else ""


# Heading -> cell. Several tables, because one would be too wide for most terminals.
LOSSES = {
    "final BPT [95 %]": _interval("final_bpt"),
    "± seeds": _number("final_bpt_over_seeds", ".4f"),
    "final - none [95 %]": _interval("final_minus_none", "+"),
    "best BPT [95 %]": _interval("best_bpt"),
    "±  seeds": _number("best_bpt_over_seeds", ".4f"),
}
CONTROL = {
    "runs": _number("runs", "d"),
    "best at step": _number("best_step", ".0f"),
    "training BPT": _number("final_training_bpt", ".3f"),
    "S or K": _number("final_s", ".4f"),
    "reached at": _number("step_in_deadband", ".0f"),
    "in deadband": _number("fraction_in_deadband", ".0%"),
    "λ": _number("final_lambda", ".3g"),
    "penalty": _number("final_penalty_nats", ".3g"),
}
REMEDIES = {
    "stopped early [95 %]": _interval("stopped_bpt"),
    "scaled [95 %]": _interval("scaled_bpt"),
    "scale": _number("scale", ".2f"),
    "KL on texts": _number("text_kl_bits", ".4f"),
    "rise on texts": _number("text_bpt_rise", "+.4f"),
}
NOTES = (
    "BPT: held-out bits per target token; final: after the last step, best: at the evaluation where it was lowest.",
    "[ ]: 95 % bootstrap interval over documents; final - none: over documents and seeds, paired.",
    "± seeds: standard deviation over the seeds. Training BPT: mean of the last 20 steps.",
    "S (of kl: K, bits), λ and penalty (λ ln 2 ParamBPT or λ K, nats/token): at the end. All are means over the seeds.",
    "In deadband: fraction of the steps from the one on at which S or K reached it.",
    "Stopped early: at the evaluation that is best on one half of the documents, measured on the other half, and back;",
    "scaled: the same among scales of the finished adapter. Texts: bits per token from the base, at the end.",
)


def result_tables(comparison: Comparison) -> list[Table]:
    """Build the tables for a terminal: held-out loss, then the controller's behavior."""
    tables = []
    for columns in (LOSSES, CONTROL, REMEDIES):
        table = Table(box=None, pad_edge=False)
        table.add_column("", no_wrap=True)
        for heading in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in comparison.rows():
            table.add_row(row["setting"], *(cell(row) for cell in columns.values()))
        tables.append(table)
    return tables


def statements(comparison: Comparison) -> list[str]:
    """Return the differences of interest, each with its interval and the conclusion it allows."""
    lines: list[str] = []
    for one, other, moment, of_other in _questions(comparison):
        difference = comparison.difference(one, other, moment, of_other)
        if difference is not None:
            subtracted = other.label if of_other == moment else f"{other.label} {of_other}"
            seeds = ""
            if difference.over_seeds is not None:
                low, high = difference.over_seeds
                seeds = f", over seeds [{low:+.4f}, {high:+.4f}]"
            words = f"{difference.text('+')}{seeds}: {_verdict(difference, one)}"
            lines.append(f"{moment} BPT, {one.label} - {subtracted}: {words}")
    for measure in dict.fromkeys(setting.measure for setting in comparison.find("fixed")):
        if found := comparison.edge(measure, "final"):
            best, end = found
            lines.append(
                f"the best fixed lambda, {best.lambda_:g}, is the {end} of the sweep: the optimum may lie beyond it; "
                "pass more with --lambdas"
            )
    for setting in comparison.find("pi"):
        lines.append(_scu_controller(comparison, setting))
    return lines


def write_results(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the table and statements as Markdown, every run as CSV, and all figures as JSON; return the paths."""
    columns = {"setting": lambda row: row["setting"], **LOSSES, **CONTROL, **REMEDIES}
    text = [_markdown([*columns]), _markdown(["---"] + ["---:"] * (len(columns) - 1))]
    text += [_markdown([cell(row) for cell in columns.values()]) for row in comparison.rows()]
    lines = statements(comparison)
    paths = [folder / f"compare.{suffix}" for suffix in ("md", "csv", "json")]
    paths[0].write_text("\n".join([*text, "", *NOTES, "", *(f"- {line}" for line in lines)]) + "\n", encoding="utf-8")
    numbers = [result.numbers() for result in comparison.results]
    with paths[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(numbers[0]))
        writer.writeheader()
        writer.writerows(numbers)
    record = {
        "documents": len(comparison.tokens_D),
        "target_tokens": int(comparison.tokens_D.sum()),
        "confidence": CONFIDENCE,
        "settings": [
            {name: asdict(value) if isinstance(value, Interval) else value for name, value in row.items()}
            for row in comparison.rows()
        ],
        "statements": lines,
        "runs": [
            {**result.numbers(), "evaluated_at": result.steps, "heldout_bpt": result.curve.tolist()}
            for result in comparison.results
        ],
    }
    paths[2].write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return paths


def _questions(comparison: Comparison) -> Iterator[tuple[Setting, Setting, str, str]]:
    """Yield the pairs to compare: PI and the best fixed lambda with no regularizer, its remedies and all others."""
    nothing = comparison.find("none")
    for moment in ("final", "best"):
        for pi in comparison.find("pi"):
            fixed = comparison.best_fixed(pi.measure, moment)
            others = [*nothing, *([fixed] if fixed else [])]
            others += comparison.find("linear", pi.measure) + comparison.find("cosine", pi.measure)
            for other in others:
                yield pi, other, moment, moment
        for measure in dict.fromkeys(setting.measure for setting in comparison.find("fixed")):
            fixed = comparison.best_fixed(measure, moment)
            if fixed and nothing:
                yield fixed, nothing[0], moment, moment
        steered = comparison.find("pi")
        if len(steered) == 2 and steered[0].measure != steered[1].measure:
            yield steered[0], steered[1], moment, moment
    for none in nothing:
        for remedy in ("stopped", "scaled"):
            for pi in comparison.find("pi"):
                yield pi, none, "final", remedy
            yield none, none, remedy, "final"


def _verdict(difference: Interval, one: Setting) -> str:
    if difference.over_seeds is None:
        return "one seed, which says nothing of others"
    return {-1: f"{one.label} is lower", 1: f"{one.label} is higher", 0: "no difference shown"}[difference.sign]


def _scu_controller(comparison: Comparison, setting: Setting) -> str:
    """Describe whether S or K reached its target and stayed there."""
    held = "K" if setting.measure == "kl" else "S"
    runs = [run.numbers() for run in comparison.by_setting[setting]]
    reached = [run for run in runs if run["step_in_deadband"] is not None]
    around = f"{held} reached the deadband around {runs[0]['target']:g}"
    head = f"{setting.label}: {around} in {len(reached)} of {len(runs)} runs"
    if not reached:
        ends = ", ".join(f"{run['final_s']:.4f}" for run in runs)
        return f"{head}; at the end {held} was {ends}"
    steps = ", ".join(str(run["step_in_deadband"]) for run in reached)
    fractions = ", ".join(f"{run['fraction_in_deadband']:.0%}" for run in reached)
    return f"{head}, at step {steps}, and was inside it for {fractions} of the steps from there on"


def _markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
