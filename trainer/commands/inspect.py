"""`zerolora inspect CONFIG [key=value ...] [--examples N | --step N]`: show the data that the model is trained on.

For text: examples with trained tokens in color (in ⟦brackets⟧ without colors), and with their weight if it is below 1;
the fraction of trained tokens, truncation, packing, and warnings about loss masks that are usually mistakes. For
images: captions, and how images are resized and cropped. With --step: the data that all ranks read in that step.
"""

import os
import sys
from io import TextIOWrapper

from rich.console import Console

from trainer.checkpoint.finished_run import silence_libraries
from trainer.config import CommandParser, load_config, reports_errors
from trainer.config.command_line import parse_positive_int, parse_rank_count
from trainer.contract.default_ranks import choose_default_ranks
from trainer.setup.kinds import find_model_kind


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(prog="zerolora inspect", description="Show examples with trained tokens in color.")
    parser.add_config()
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--examples", type=parse_positive_int, default=3, help="number of examples (default: 3)")
    shown.add_argument("--step", type=parse_positive_int, help="show the data of this step (from 1) instead")
    parser.add_argument(
        "--ranks", type=parse_rank_count, help="number of ranks (default: as `zerolora train` would start here)"
    )
    arguments = parser.parse_intermixed_args(argv)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # data may contain characters that the terminal cannot show
    console = Console()
    silence_libraries()
    ranks = arguments.ranks or choose_default_ranks()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing here computes on a device
    loaded = load_config(arguments.config, arguments.overrides)
    for note in loaded.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    find_model_kind(loaded.config).show_data(
        loaded.config, console, examples=arguments.examples, step=arguments.step, ranks=ranks
    )
