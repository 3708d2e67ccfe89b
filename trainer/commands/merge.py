"""`zerolora merge RUN`: merge base model and adapter into one model that needs neither PEFT nor zerolora."""

from pathlib import Path

from trainer.checkpoint.finished_run import add_run_arguments, find_run, silence_libraries
from trainer.commands.adapter_kinds import get_adapter_class
from trainer.config import CommandParser, reports_errors
from trainer.model.integer_weights import BITS
from trainer.model.saved_adapter import parse_scale
from trainer.parallel.engine.deepspeed_engine import DTYPES
from trainer.setup.kinds import check_task_supports


@reports_errors(RuntimeError)
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(
        prog="zerolora merge", description="Merge an adapter into its full-precision base model, as safetensors."
    )
    add_run_arguments(parser, "location of the full-precision base model, if it was moved")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write the model (default: RUN/merged)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "stored", *DTYPES),
        default="auto",
        help="dtype of the weights (auto: the dtype in config.json, or with --quantize the training dtype; stored: "
        "the base's 4-bit format)",
    )
    parser.add_argument(
        "--scale", type=parse_scale, default=1.0, metavar="X", help="factor for the adapter's update (default: 1)"
    )
    parser.add_argument(
        "--quantize",
        choices=tuple(BITS),
        help="store adapted layers as integers in compressed-tensors format, for vLLM and SGLang (see training.qat)",
    )
    arguments = parser.parse_args(argv)
    silence_libraries()
    run = find_run(arguments.run, arguments.base_model, allow_mismatch=arguments.allow_mismatch)
    name = "merged" if arguments.quantize is None else f"merged-{arguments.quantize}"
    options = {"dtype": arguments.dtype, "scale": arguments.scale, "quantize": arguments.quantize}
    used = {
        "--scale": arguments.scale != 1.0,
        "--quantize": arguments.quantize is not None,
        "--dtype=stored": arguments.dtype == "stored",
    }
    for option in (option for option, is_used in used.items() if is_used):
        check_task_supports(run, f"merge {option}")
    print(f"merged model: {get_adapter_class(run).merge(run, arguments.output or arguments.run / name, **options)}")
