"""The subcommands of `zerolora` that need torch, one module or package each."""

from trainer.parallel.ranks.lean_imports import hook_imports

hook_imports()  # before any subcommand imports a library
