"""`zerolora scu-train`: run `zerolora train` with the flags and defaults of the published SCU guide.

The flags (trainer/config/scu_flags.py) become OUTPUT/logs/scu-train.yaml, which `zerolora train` runs. Its output is
also written to OUTPUT/logs/cuda_optimized_training.log.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from launcher.doctor.command import show as show_checks
from launcher.doctor.this_host import check_driver, check_packages, check_space
from launcher.supervision.terminal import show
from trainer.config import UserError
from trainer.config.scu_flags import (
    CONFIG_FILE,
    LOG_FILE,
    load_flags,
    open_log,
    parse,
    resumed_ranks,
    resumed_settings,
    settings,
)
from trainer.config.yaml_core import dump
from trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK, PASSED_ON
from trainer.contract.launcher_process import tie_children_to_this_process

FREE_GIB = 10.0
# Demo data from the standard library's sources, made in a child process: the launcher imports no trainer.
DEMO_DATA = (
    "import os; from pathlib import Path; from trainer.data.demo_data import demo_data; "
    "print(*demo_data(Path(os.environ.get('ZEROLORA_CACHE') or '~/.cache/zerolora').expanduser()), sep='\\n')"
)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code of `zerolora train` or of the check."""
    options = parse(arguments)
    if options.check_requirements:
        return check_requirements(Path(options.output_dir))
    overrides = list(options.overrides)
    tree = resumed_settings(options)
    text = dump(settings(options, *_find_data(options)) if tree is None else tree)
    with tempfile.TemporaryDirectory() as folder:
        # Check before writing anything into the output folder.
        draft = Path(folder) / CONFIG_FILE
        draft.write_text(text, encoding="utf-8")
        output = Path(load_flags(draft, options).config.output_dir)
    config = output / "logs" / CONFIG_FILE
    several = options.multi_gpu or (tree is not None and resumed_ranks(output) > 1)
    train = ["train", str(config), *overrides, *([] if several else ["--num-gpus", "1"])]
    header = f"# zerolora {shlex.join(train)}\n"
    if options.dry_run:
        print(header + text, end="")
        return EXIT_OK
    open_log(output).close()
    config.write_text(header + text, encoding="utf-8")
    show(f"the same as: zerolora {shlex.join(train)}")
    return _run_logged([sys.executable, "-m", "launcher.cli", *train], output / LOG_FILE)


def check_requirements(output: Path) -> int:
    """Print what `zerolora doctor` finds on this machine without importing torch; return 1 if something fails."""
    checks = [*check_packages(), *check_driver(), check_space("disk: output_dir", output, FREE_GIB)]
    show_checks(checks, as_json=False)
    return EXIT_FAILED if any(check.state == "FAIL" for check in checks) else EXIT_OK


def _find_data(options: argparse.Namespace) -> tuple[str, str | None]:
    """Return the training text, and the held-out text if it is a separate file."""
    if options.data is not None:
        return options.data, None
    made = subprocess.run([sys.executable, "-c", DEMO_DATA], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        raise UserError("--data: the standard library's text could not be made (see above); use a file of your own")
    train, held_out = made.stdout.splitlines()[-2:]
    return train, held_out


def _run_logged(command: Sequence[str], log_path: Path) -> int:
    """Run a command, copy its output to this terminal and append it to a log, and return its exit code."""
    tie_children_to_this_process()
    with open(log_path, "ab") as log:
        # In its own session, so that Ctrl-C reaches it only once, forwarded by this process.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

        def forward(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        before = {number: signal.signal(number, forward) for number in PASSED_ON}
        streams = ((process.stdout, 1), (process.stderr, 2))
        copiers = [threading.Thread(target=_copy, args=(stream, fd, log)) for stream, fd in streams]
        for copier in copiers:
            copier.start()
        try:
            code = process.wait()
            for copier in copiers:
                copier.join()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _copy(stream: IO[bytes], fd: int, log: IO[bytes]) -> None:
    for line in iter(stream.readline, b""):
        log.write(line)
        log.flush()
        try:
            os.write(fd, line)
        except OSError:
            continue  # the terminal is closed; the run continues, and the log has the rest
