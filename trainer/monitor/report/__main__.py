"""`zerolora report RUN [RUN ...] [--open]`: write a run's report, or a page that compares several runs."""

import sys
import webbrowser
from pathlib import Path

from trainer.config import CommandParser, UserError, reports_errors
from trainer.monitor.report.comparison import PAGE, write_comparison_page
from trainer.monitor.report.write import write_report


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(prog="zerolora report", description="Write an HTML page of one or more runs.")
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="output folder of a run; several runs are compared"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"output file for several runs (default: {PAGE})")
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    arguments = parser.parse_args(argv)
    runs, output = arguments.runs, arguments.output
    if len(runs) == 1 and output is not None:
        raise UserError(f"--output {output}: needs several runs (one run's report is RUN/report.html); remove --output")
    page = write_report(runs[0]) if len(runs) == 1 else write_comparison_page(runs, output or Path(PAGE))
    print(page)
    if arguments.open and not webbrowser.open(page.resolve().as_uri()):
        print("no browser found; open the page yourself", file=sys.stderr)
