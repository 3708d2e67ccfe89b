"""`python -m trainer.monitor.report RUN [--open]`: plots and an HTML page of a run."""

import sys
import webbrowser
from pathlib import Path

from trainer.config import CommandParser, UserError
from trainer.monitor.report.write import write_report


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 after one line on stderr."""
    parser = CommandParser(prog="zerolora report", description="Plots and an HTML page of a run.")
    parser.add_argument("run", type=Path, help="output folder of the run")
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    arguments = parser.parse_args(argv)
    try:
        page = write_report(arguments.run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(page)
    if arguments.open and not webbrowser.open(page.resolve().as_uri()):
        print("no browser found; open the page by hand", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
