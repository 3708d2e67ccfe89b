"""One module or package for each subcommand of `zerolora` that needs torch."""

from trainer.parallel.ranks.lean_imports import import_lean

import_lean()  # before the first of them imports a library
