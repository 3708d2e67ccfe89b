"""`zerolora prepare CONFIG [key=value ...]`: check a run and tokenize its data, without loading weights.

`zerolora train` runs it with `--phases` before starting ranks on other hosts.
"""

from functools import partial

from trainer.config import CommandParser, load_config, reports_errors
from trainer.config.command_line import parse_rank_count
from trainer.setup.preflight import build_operators, prepare_to_resume


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(prog="zerolora prepare", description="Check a run and tokenize its data.")
    parser.add_config()
    parser.add_argument("--world-size", type=parse_rank_count, help="number of ranks that will train")
    parser.add_argument("--phases", action="store_true", help="print the current phase instead of results")
    arguments = parser.parse_intermixed_args(argv)
    show = partial(print, flush=True) if arguments.phases else lambda phase: None
    config = load_config(arguments.config, arguments.overrides).config
    prepared, resumption = prepare_to_resume(config, arguments.world_size, show)
    if not arguments.phases:
        for line in (*prepared.data.stats.format_summary(), *resumption.warnings, *resumption.notes):
            print(line)
    build_operators(config, show)
