"""`zerolora validate CONFIG [key=value ...]`: run all checks that precede training, and describe the run.

Checks the model's configuration, tokenizer and targets, and tokenizes the data into its cache. Reads no weights, and
writes nothing to the run's folder. `--settings-only` checks neither model nor data.
"""

import os
import shlex

from trainer.checkpoint.output_folder import check_inputs_and_output, describe_output_problem
from trainer.config import CommandParser, load_config, reports_errors
from trainer.config.command_line import parse_rank_count
from trainer.contract.default_ranks import choose_default_ranks
from trainer.contract.standard_streams import PROGRESS


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(
        prog="zerolora validate", description="Check a configuration, its model and its data without training."
    )
    parser.add_config()
    parser.add_argument(
        "--ranks", type=parse_rank_count, help="number of ranks (default: as `zerolora train` would start here)"
    )
    parser.add_argument("--settings-only", action="store_true", help="check only the settings, not the model or data")
    arguments = parser.parse_intermixed_args(argv)
    ranks = arguments.ranks or choose_default_ranks()
    words = [arguments.config, *arguments.overrides]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing here computes on a device
    # Fast, because torch is not imported yet.
    loaded = load_config(arguments.config, arguments.overrides)
    for note in loaded.notes:
        print(f"note: {note}")
    if arguments.settings_only:
        command = shlex.join(["zerolora", "validate", *words, *["--ranks", str(ranks)] * bool(arguments.ranks)])
        print(f"OK: the settings in {arguments.config}; to check the model and data: {command}")
        return
    check_inputs_and_output(loaded.config, for_training=False)
    PROGRESS.show("importing")
    from trainer.checkpoint.finished_run import silence_libraries
    from trainer.commands.run_description import describe_run
    from trainer.setup.preflight import prepare_to_resume

    silence_libraries()
    prepared, resumption = prepare_to_resume(loaded.config, ranks, report=PROGRESS.show, for_training=False)
    for warning in resumption.warnings:
        print(f"warning: {warning}")
    for line in describe_run(loaded.config, prepared, ranks):
        print(line)
    if resumption.checkpoint is not None:
        print(f"resume: from {resumption.checkpoint}")
    for note in resumption.notes:
        print(f"resume: {note}")
    if problem := describe_output_problem(loaded.config):
        print(f"OK except for output_dir={loaded.config.output_dir}: {problem}")
    else:
        number = ["--num-gpus", str(ranks)] if arguments.ranks else []
        print(f"OK: {shlex.join(['zerolora', 'train', *words, *number])}")
