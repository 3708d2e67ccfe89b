"""`zerolora scu-train`: run `zerolora train` with the flags and defaults of the published SCU guide.

The flags (trainer/config/scu_flags.py) are converted to OUTPUT/logs/scu-train.yaml, which `zerolora train` runs. Its
output is also written to OUTPUT/logs/cuda_optimized_training.log.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launcher.doctor.command import print_checks
from launcher.doctor.this_host import check_driver, check_packages, check_space
from launcher.supervision.processes import run_child
from launcher.supervision.terminal import print_progress
from trainer.config import UserError
from trainer.config.scu_flags import (
    CONFIG_FILE,
    LOG_FILE,
    build_settings,
    load_flag_config,
    load_resumed_settings,
    open_log,
    parse_flags,
    read_resumed_ranks,
)
from trainer.config.yaml_core import dump
from trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK

MIN_FREE_GIB = 10.0
# Demo data from the standard library's sources; written by a child process, because the launcher imports no torch.
DEMO_DATA_CODE = (
    "import os; from pathlib import Path; from trainer.data.demo_data import build_demo_data; "
    "print(*build_demo_data(Path(os.environ.get('ZEROLORA_CACHE') or '~/.cache/zerolora').expanduser()), sep='\\n')"
)


def run(arguments: Sequence[str]) -> int:
    """Replace this process with `zerolora train`; return only after an error, a check or a dry run."""
    options = parse_flags(arguments)
    if options.check_requirements:
        return check_requirements(Path(options.output_dir))
    overrides = list(options.overrides)
    tree = load_resumed_settings(options)
    text = dump(build_settings(options, *_prepare_data(options)) if tree is None else tree)
    with tempfile.TemporaryDirectory() as folder:
        # Check before writing anything into the output folder.
        draft = Path(folder) / CONFIG_FILE
        draft.write_text(text, encoding="utf-8")
        checked = load_flag_config(draft, options).config
        check = ["trainer.commands.prepare_run", "--phases", str(draft), *overrides]
        if not options.dry_run and (code := run_child([sys.executable, "-m", "launcher.module", *check])):
            return code
    output = Path(checked.output_dir)
    config = output / "logs" / CONFIG_FILE
    uses_all_gpus = options.multi_gpu or (tree is not None and read_resumed_ranks(output) > 1)
    train = ["train", str(config), *overrides, *([] if uses_all_gpus else ["--num-gpus", "1"])]
    header = f"# zerolora {shlex.join(train)}\n"
    if options.dry_run:
        print(header + text, end="")
        return EXIT_OK
    open_log(output).close()
    config.write_text(header + text, encoding="utf-8")
    print_progress(f"equivalent command: zerolora {shlex.join(train)}")
    for descriptor in (1, 2):  # append all further output to the log, in addition to printing it
        tee = ["tee", "-a", "-p", str(output / LOG_FILE)]
        copier = subprocess.Popen(tee, stdin=subprocess.PIPE, stdout=descriptor, start_new_session=True)
        assert copier.stdin is not None
        os.dup2(copier.stdin.fileno(), descriptor)
        copier.stdin.close()
    os.execv(sys.executable, [sys.executable, "-m", "launcher.cli", *train])


def check_requirements(output: Path) -> int:
    """Check packages, GPU driver and disk space, and print the results; return 1 if a check fails."""
    checks = [*check_packages(), *check_driver(), check_space("disk: output_dir", output, MIN_FREE_GIB)]
    print_checks(checks, as_json=False)
    return EXIT_FAILED if any(check.state == "FAIL" for check in checks) else EXIT_OK


def _prepare_data(options: argparse.Namespace) -> tuple[str, str | None]:
    if options.data is not None:
        return options.data, None
    result = subprocess.run([sys.executable, "-c", DEMO_DATA_CODE], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise UserError("--data: the demo data could not be written (see above); pass your own file")
    train, held_out = result.stdout.splitlines()[-2:]
    return train, held_out
