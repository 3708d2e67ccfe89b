"""`python -m trainer.commands.inspect CONFIG [key=value ...] [--examples N | --step N]`: show the data as trained on.

For text: examples with trained tokens in colour (in ⟦brackets⟧ without colours), and with their weight if it is below
1; the fraction of trained tokens, truncation, packing, and warnings about loss masks that are usually mistakes. For
images: captions, and how images are resized and cropped. With a step: what all ranks train on in that step.
"""

import os
import sys
from collections.abc import Iterable
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from trainer.checkpoint.finished_run import quiet_libraries
from trainer.config import CommandParser, RunConfig, UserError, load_config, reports_errors
from trainer.config.command_line import positive_int
from trainer.config.errors import printable
from trainer.config.types import AUTO
from trainer.contract.default_ranks import default_ranks
from trainer.contract.standard_streams import PROGRESS
from trainer.data import Batches, DataStats, PreparedData, Sample, Samples, prepare_data
from trainer.data.conversations import find_chat_template
from trainer.data.prepared import fit_max_length
from trainer.data.records import PLAIN_TEXT
from trainer.data.samples import decode_parts, split_documents
from trainer.data.shared_prompts import measure_savings
from trainer.data.step_count import count_steps, global_batch, resolve_global_batch, steps_per_epoch
from trainer.model.base import context_length, load_model_config, load_tokenizer
from trainer.model.image_reader import load_image_reader
from trainer.tasks.images.batches import draw_order
from trainer.tasks.images.pipeline import is_pipeline
from trainer.tasks.images.prepare import prepare_image_run

# Documents shown per pack.
SHOWN_DOCUMENTS = 2
# Samples of a stream from which its statistics are computed.
STREAM_EXAMPLES = 200
# Characters shown per document of a step.
SHOWN_CHARACTERS = 100


def read_data(config: RunConfig) -> tuple[Any, PreparedData]:
    """Return the tokenizer and the tokenized data of a run. Raises UserError."""
    tokenizer = load_tokenizer(config.base_model, config.model)
    if config.dataset.chat_template:
        tokenizer.chat_template = find_chat_template(tokenizer, config.dataset.chat_template)
    model_config = load_model_config(config.base_model, config.model)
    longest = context_length(model_config)
    return tokenizer, prepare_data(
        fit_max_length(config, longest).dataset,
        tokenizer,
        seed=config.seed,
        cache_dir=Path(config.dataset.cache_dir).expanduser(),
        max_length_of_model=longest,
        images=load_image_reader(config, tokenizer, model_config),
    )


def show_data(data: PreparedData, tokenizer: PreTrainedTokenizerBase, console: Console, *, examples: int) -> None:
    """Print the first `examples` samples, statistics of the data, and warnings."""
    if isinstance(data.train, Samples):
        shown, stats = [data.train[index] for index in range(min(examples, len(data.train)))], data.stats
        seen = shown
    else:
        seen = list(islice(data.train.read(0), STREAM_EXAMPLES))
        shown, stats = seen[:examples], _compute_stats(seen, data.stats)
    for number, sample in enumerate(shown, start=1):
        console.print(_panel(sample, tokenizer, number, colours=console.color_system is not None))
    for line in data.stats.lines():
        style = "bold yellow" if line.startswith("warning: ") else ""
        console.print(Text(line, style=style), soft_wrap=True)
    if stats is not data.stats:
        console.print(f"of the first {len(seen)} samples: {stats.trained_fraction:.1%} of the tokens are trained")
    for warning in warnings(stats):
        console.print(Text(f"warning: {warning}", style="bold yellow"), soft_wrap=True)


def show_step(
    config: RunConfig, data: PreparedData, tokenizer: Any, console: Console, *, step: int, ranks: int
) -> None:
    """Print a line for each document of a step (from 1) of a run on `ranks` ranks.

    Raises UserError for a stream, and for a batch size that is chosen at the start.
    """
    if not isinstance(data.train, Samples):
        raise UserError("dataset.streaming=true: the samples of a step are only known during the run; leave out --step")
    for index in _find_step(config, data.train, step, ranks):
        for number, document in enumerate(split_documents(data.train[index])):
            text = " ".join(tokenizer.decode(document.input_ids, skip_special_tokens=False).split())
            place = f"sample {index}" + (f", document {number + 1}" if number else "")
            console.print(
                f"{place} ({len(document.input_ids)} tokens): {printable(text)[:SHOWN_CHARACTERS]}",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip


def _find_step(config: RunConfig, samples: Any, step: int, ranks: int) -> list[int]:
    """Return the samples of a step; raises UserError if the run has no such step, or its batch size is open."""
    ranks = config.data_ranks(ranks)
    training = resolve_global_batch(config, len(samples), ranks).training
    if training.batch_size == AUTO:
        raise UserError("training.batch_size=auto: chosen at the start; use the training_config.json of the run")
    if (last := count_steps(training, len(samples), ranks)) is not None and step > last:
        raise UserError(f"--step {step}: the run has {last:,} steps; use one of them")
    size, seed, shuffle = global_batch(training, ranks), config.seed, config.dataset.shuffle
    epoch, in_epoch = divmod(step - 1, steps_per_epoch(len(samples), size))
    if isinstance(samples, Samples):
        batches = Batches(samples, batch_size=size, accumulation=1, rank=0, world_size=1, seed=seed, shuffle=shuffle)
        order = batches.order(epoch)
    else:
        order = draw_order(samples, epoch, together=size, seed=seed, shuffle=shuffle)
    return order[in_epoch * size : (in_epoch + 1) * size].tolist()


def show_images(config: RunConfig, console: Console, *, examples: int, step: int | None, ranks: int) -> None:
    """Print a line for each of the first images and statistics, or for each image of a step (from 1)."""
    data = prepare_image_run(config, lambda line: None).data
    samples = data.train
    chosen: Iterable[int] = range(min(examples, len(samples)))
    if step:
        chosen = _find_step(config, samples, step, ranks)
    for index in chosen:
        entry = samples[index]
        (width, height), (left, top) = entry.original, entry.crop
        cut = f", cut by {left} at each side" * (left > 0) + f", cut by {top} above and below" * (top > 0)
        console.print(
            f"{entry.name}: {width} x {height} as {entry.width} x {entry.height}{cut}: "
            f"{samples.store.captions[entry.caption]!r}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    for line in [] if step else data.stats.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def warnings(stats: DataStats) -> list[str]:
    """Return warnings about probable mistakes in the loss masks: nothing or everything is trained."""
    found = []
    predictable = stats.tokens - stats.documents  # nothing comes before a document's first token
    if stats.target_tokens == 0:
        found.append("0 % of the tokens are trained; check dataset.train_on and the examples above")
    elif stats.target_tokens >= predictable and stats.prompt_text != PLAIN_TEXT:
        found.append("100 % of the tokens are trained, prompts as well as answers; check dataset.train_on")
    return found


def _panel(sample: Sample, tokenizer: PreTrainedTokenizerBase, number: int, *, colours: bool) -> Panel:
    text = Text()
    documents = list(split_documents(sample))
    for index, document in enumerate(documents[:SHOWN_DOCUMENTS]):
        if index:
            text.append("\n──── next document, masked from the one above ────\n", style="cyan")
        for weight, part in decode_parts(document, tokenizer):
            style = "bold yellow" if 0 < weight < 1 else "bold green" if weight else "dim"
            part = f"{weight:g}: {part}" if 0 < weight < 1 else part
            text.append(part if colours or not weight else f"⟦{part}⟧", style=style)
    more = len(documents) - SHOWN_DOCUMENTS
    if more > 0:
        text.append(f"\n──── and {more} more document{'s' * (more > 1)} in this pack ────", style="cyan")
    tokens, trained_tokens = len(sample.input_ids), sum(weight > 0 for weight in sample.trained)
    several = f", {len(sample.document_lengths)} documents" if len(sample.document_lengths) > 1 else ""
    fraction = trained_tokens / tokens if tokens else 0.0
    return Panel(text, title=f"example {number}: {tokens} tokens{several}, {trained_tokens} trained ({fraction:.0%})")


def _compute_stats(samples: list[Sample], whole: DataStats) -> DataStats:
    documents = [document for sample in samples for document in split_documents(sample)]
    return DataStats(
        records=len(documents),
        documents=len(documents),
        samples=len(samples),
        tokens=sum(len(document.input_ids) for document in documents),
        target_tokens=sum(weight > 0 for document in documents for weight in document.trained[1:]),
        max_length=whole.max_length,
        prompt_text=whole.prompt_text,
    )


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(prog="zerolora inspect", description="Show examples, trained tokens in colour.")
    parser.add_config()
    parser.add_argument("--examples", type=positive_int, default=3, help="number of examples (3)")
    parser.add_argument("--step", type=positive_int, help="show what this step (from 1) trains on instead")
    parser.add_argument("--ranks", type=positive_int, help="number of ranks of the run (default: as on this machine)")
    arguments = parser.parse_intermixed_args(argv)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # data may hold characters that the terminal cannot show
    console = Console()
    quiet_libraries()
    ranks = arguments.ranks or default_ranks()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing here computes on a device
    loaded = load_config(arguments.config, arguments.overrides)
    config = loaded.config
    for note in loaded.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if is_pipeline(config):
        show_images(config, console, examples=arguments.examples, step=arguments.step, ranks=ranks)
        return
    PROGRESS.show(f"reading {config.base_model} and the data")
    tokenizer, data = read_data(config)
    if config.training.loss != "nll" or config.training.neftune_noise_alpha:
        noise = config.training.neftune_noise_alpha
        console.print(f"loss: {config.training.loss}" + f"; noise on embeddings: {noise:g}" * (noise > 0))
    if arguments.step:
        show_step(config, data, tokenizer, console, step=arguments.step, ranks=ranks)
    else:
        show_data(data, tokenizer, console, examples=arguments.examples)
    if config.preference.share_prompt and isinstance(data.train, Samples):
        console.print(f"shared prompts: save {measure_savings(data.train):.1%} of the tokens")


if __name__ == "__main__":
    sys.exit(main())
