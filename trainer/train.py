"""Entry point of a rank: run trainer/entry/rank.py, or trainer/entry/prestart.py if the rank is prestarted.

deepspeed --module trainer.train CONFIG [key=value ...]      or      torchrun -m trainer.train CONFIG [key=value ...]
"""

import gc
import os
import sys

from trainer.contract.rank_arguments import PRESTARTED
from trainer.contract.standard_streams import PROGRESS
from trainer.parallel.ranks.lean_imports import import_common_modules
from trainer.parallel.ranks.training_process import set_up_process


def main(argv: list[str] | None = None) -> int:
    set_up_process()
    gc.disable()  # until all imports are done
    arguments = sys.argv[1:] if argv is None else argv
    if PRESTARTED in arguments:
        if os.environ["RANK"] == "0":
            PROGRESS.show("importing")
        from trainer.entry.prestart import main as prestart

        return prestart(arguments)
    from trainer.entry.rank import main as train

    import_common_modules()
    return train(arguments)


if __name__ == "__main__":
    code = main()
    from trainer.parallel.ranks.group import exit_process

    exit_process(code)
