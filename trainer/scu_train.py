"""Entry point of a rank that torchrun or DeepSpeed starts, with the flags of `zerolora scu-train`.

torchrun --nproc_per_node 2 -m trainer.scu_train --bf16     or     deepspeed --module trainer.scu_train --bf16
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainer.config import UserError
from trainer.config.scu_flags import (
    CONFIG_FILE,
    build_settings,
    load_flag_config,
    load_resumed_settings,
    open_log,
    parse_flags,
)
from trainer.config.yaml_core import dump
from trainer.contract.exit_codes import EXIT_DELAY_S
from trainer.contract.rendezvous import read_rank_variables
from trainer.data.demo_data import build_demo_data
from trainer.parallel.ranks.training_process import set_up_process


def main(argv: list[str] | None = None) -> int:
    set_up_process()
    arguments = sys.argv[1:] if argv is None else argv
    rank = local_rank = 0
    try:
        _, rank, _, local_rank = read_rank_variables(os.environ)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / CONFIG_FILE
            overrides, output = _write_settings(path, arguments)
            if rank == 0:
                _copy_to_log(output)
            from trainer.entry.rank import main as train

            return train([str(path), *overrides])
    except (UserError, ValueError) as error:
        if local_rank == 0:
            print(f"error: {error}", file=sys.stderr)
        else:
            time.sleep(EXIT_DELAY_S)
        return UserError.exit_code


def _write_settings(path: Path, arguments: list[str]) -> tuple[list[str], Path]:
    options = parse_flags(arguments, on_rank=True)
    for flag in ("check_requirements", "dry_run"):
        if getattr(options, flag):
            option = f"--{flag.replace('_', '-')}"
            raise UserError(f"{option}: not supported under torchrun or deepspeed; run `zerolora scu-train {option}`")
    tree = load_resumed_settings(options)
    if tree is None:
        data, held_out = options.data, None
        if data is None:
            cache = Path(os.environ.get("ZEROLORA_CACHE") or "~/.cache/zerolora").expanduser()
            data, held_out = map(str, build_demo_data(cache))
        tree = build_settings(options, data, held_out)
    path.write_text(dump(tree), encoding="utf-8")
    return list(options.overrides), Path(load_flag_config(path, options).config.output_dir)


def _copy_to_log(output_dir: Path) -> None:
    with open_log(output_dir) as log:
        copier = subprocess.Popen(["tee", "-a", log.name], stdin=subprocess.PIPE, start_new_session=True)
    assert copier.stdin is not None
    os.dup2(copier.stdin.fileno(), 1)
    copier.stdin.close()


if __name__ == "__main__":
    code = main()
    from trainer.parallel.ranks.group import exit_process

    exit_process(code)
