"""The subcommands of `zerolora` that need torch, one module or package each."""

from trainer.parallel.ranks.lean_imports import import_lean

import_lean()  # before any subcommand imports a library
