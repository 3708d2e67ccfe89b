"""One module or package for each subcommand of `zerolora` that needs torch."""
