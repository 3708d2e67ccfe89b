"""Run a prestarted rank (trainer/contract/rank_arguments.py): import, check and wait for the start message.

Every rank imports the libraries. Rank 0 checks the run and prepares the data; other ranks read the model's files.
Training reuses the results. Nothing is written to the run's folder.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from trainer.config import UserError, load_config
from trainer.config.errors import convert_path_error
from trainer.contract.exit_codes import EXIT_FAILED, get_signal_exit_code
from trainer.contract.rank_arguments import CHECKED_MESSAGE, PRESTARTED, StartMessage, open_channel
from trainer.contract.standard_streams import open_forgiving_stream
from trainer.data.prepared import PreparedRun
from trainer.entry.rank import main as train
from trainer.monitor.console import redirect_output_to
from trainer.parallel.ranks.lean_imports import import_common_modules
from trainer.parallel.ranks.progress import phase
from trainer.setup.kinds import find_model_kind
from trainer.setup.preflight import prepare_to_resume


def main(argv: list[str]) -> int:
    """Import libraries, run the checks on rank 0, wait for the start message, and train; return the exit code."""
    channel = open_channel()
    # The terminal may be closed during the checks, as in `zerolora train c.yaml | head -1`.
    sys.stdout, sys.stderr = open_forgiving_stream(1), open_forgiving_stream(2)
    with _silence_libraries():
        import_common_modules()
    config, overrides = argv[0], [word for word in argv[1:] if word != PRESTARTED]
    prepared: PreparedRun | None
    if os.environ["RANK"] == "0":
        code, prepared = _check_run(config, overrides, int(os.environ["WORLD_SIZE"]))
        if code:
            return code
        channel.sendall(CHECKED_MESSAGE)
    else:
        prepared = _read_model_files(config, overrides)
    with phase("wait for release"):
        message = StartMessage.wait(channel)
    if message is None:
        return EXIT_FAILED
    redirect_output_to(Path(message.log))  # shared by all ranks until each opens its own log
    sys.argv[1:] = message.arguments  # for the run's record
    return train(message.arguments, prepared)


def _check_run(path: str, overrides: list[str], world_size: int) -> tuple[int, PreparedRun | None]:
    show = partial(print, flush=True)
    with _exit_on_signals(), _silence_libraries(), phase("checks"):
        try:
            prepared, _ = prepare_to_resume(load_config(path, overrides).config, world_size, show)
        except (UserError, OSError) as error:
            mistake = error if isinstance(error, UserError) else convert_path_error(error)
            if mistake is None:
                raise
            print(f"error: {mistake}", file=sys.stderr)
            return mistake.exit_code, None
    return 0, prepared


def _read_model_files(path: str, overrides: list[str]) -> PreparedRun | None:
    """Read the model's files; return None after an error, which rank 0 or this rank's training will report."""
    try:
        with phase("checks"):
            config = load_config(path, overrides).config
            return find_model_kind(config).read_files(config)
    except (UserError, OSError):
        return None


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise SystemExit on signals within the block, so that incomplete data is removed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(get_signal_exit_code(number))

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _silence_libraries() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
