"""Print a run's data for `zerolora inspect`: text (including pairs, and text with images) or images."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from trainer.config import RunConfig, UserError
from trainer.config.errors import format_count, sanitize
from trainer.config.types import AUTO
from trainer.contract.standard_streams import PROGRESS
from trainer.data.batches import Batches
from trainer.data.cache import PreparedData
from trainer.data.grouping import DataStats
from trainer.data.image_parts import decode_image, read_stored_image
from trainer.data.records import PLAIN_TEXT
from trainer.data.samples import Sample, Samples, decode_parts, split_documents
from trainer.data.shared_prompts import measure_savings
from trainer.data.step_count import compute_global_batch, compute_steps_per_epoch, count_steps, resolve_global_batch
from trainer.setup.text_run import find_task, read_data
from trainer.tasks.images.batches import draw_order
from trainer.tasks.images.prepare import prepare_image_run

# Documents shown per pack.
SHOWN_DOCUMENTS = 2
# Samples read from a stream to compute its statistics.
STREAM_EXAMPLES = 200
# Characters shown per document of a step.
SHOWN_CHARACTERS = 100
# Pixels along the longer side of an image drawn in a terminal.
DRAWN_PIXELS = 32


def show_text(config: RunConfig, console: Console, *, examples: int, step: int | None, ranks: int) -> None:
    """Print the first samples, statistics and warnings; or, if `step` (from 1) is set, one line per document in it."""
    PROGRESS.show(f"reading {config.base_model} and the data")
    prepared = read_data(config)
    tokenizer, data = prepared.tokenizer, prepared.data
    if config.training.loss != "nll" or config.training.neftune_noise_alpha:
        noise = config.training.neftune_noise_alpha
        console.print(f"loss: {config.training.loss}" + f"; noise on embeddings: {noise:g}" * (noise > 0))
    if step:
        _show_step(config, data, tokenizer, console, step, ranks)
    else:
        _show_examples(config, data, tokenizer, console, examples=examples)
    if config.preference.share_prompt and isinstance(data.train, Samples):
        console.print(f"shared prompts save {measure_savings(data.train):.1%} of the tokens")


def _show_examples(config: RunConfig, data: PreparedData, tokenizer: Any, console: Console, *, examples: int) -> None:
    if isinstance(data.train, Samples):
        samples, stats = [data.train[index] for index in range(min(examples, len(data.train)))], data.stats
    else:
        samples = list(islice(data.train.read(0), STREAM_EXAMPLES))
        stats = _compute_stats(samples, data.stats)
    for number, sample in enumerate(samples[:examples], start=1):
        console.print(_build_panel(sample, tokenizer, number, colors=console.color_system is not None))
    for line in data.stats.format_summary():
        style = "bold yellow" if line.startswith("warning: ") else ""
        console.print(Text(line, style=style), soft_wrap=True)
    if stats is not data.stats:
        console.print(f"first {len(samples)} samples: {stats.trained_fraction:.1%} of the tokens are trained on")
    for warning in list_mask_warnings(stats, config.dataset.train_on):
        console.print(Text(f"warning: {warning}", style="bold yellow"), soft_wrap=True)
    try:
        find_task(config).check_data(config, data.stats)
    except UserError as error:  # the examples may show why
        console.print(Text(f"warning: {error}", style="bold yellow"), soft_wrap=True)


def _show_step(config: RunConfig, data: PreparedData, tokenizer: Any, console: Console, step: int, ranks: int) -> None:
    if not isinstance(data.train, Samples):
        raise UserError("dataset.streaming=true: the samples of a step are not known before the run; remove --step")
    epoch, first, size = _find_step(config, len(data.train), step, ranks)
    seed, shuffle = config.seed, config.dataset.shuffle
    batches = Batches(data.train, batch_size=size, accumulation=1, rank=0, world_size=1, seed=seed, shuffle=shuffle)
    for index in batches.get_order(epoch)[first : first + size].tolist():
        for number, document in enumerate(split_documents(data.train[index])):
            text = " ".join(tokenizer.decode(document.input_ids, skip_special_tokens=False).split())
            label = f"sample {index}" + (f", document {number + 1}" if number else "")
            console.print(
                f"{label} ({format_count(len(document.input_ids), 'token')}): {sanitize(text)[:SHOWN_CHARACTERS]}",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip


def _find_step(config: RunConfig, samples: int, step: int, ranks: int) -> tuple[int, int, int]:
    """Return a step's epoch, the position of its first sample in that epoch, and its number of samples."""
    ranks = config.count_data_ranks(ranks)
    training = resolve_global_batch(config, samples, ranks).training
    if training.batch_size == AUTO:
        raise UserError("training.batch_size=auto: not known until the run starts; use its training_config.json")
    if (last := count_steps(training, samples, ranks)) is not None and step > last:
        raise UserError(f"--step {step}: the run has only {format_count(last, 'step')}; use 1 to {last}")
    size = compute_global_batch(training, ranks)
    epoch, in_epoch = divmod(step - 1, compute_steps_per_epoch(samples, size))
    return epoch, in_epoch * size, size


def show_images(config: RunConfig, console: Console, *, examples: int, step: int | None, ranks: int) -> None:
    """Print one line for each of the first images, and statistics; or, if `step` is set, one line per image in it."""
    data = prepare_image_run(config, lambda line: None).data
    samples = data.train
    chosen: Iterable[int] = range(min(examples, len(samples)))
    if step:
        epoch, first, size = _find_step(config, len(samples), step, ranks)
        order = draw_order(samples, epoch, group_size=size, seed=config.seed, shuffle=config.dataset.shuffle)
        chosen = order[first : first + size].tolist()
    for index in chosen:
        entry = samples[index]
        (width, height), (left, top) = entry.original, entry.crop
        crop = f", cropped by {left} on each side" * (left > 0) + f", cropped by {top} at top and bottom" * (top > 0)
        console.print(
            f"{entry.name}: {width} x {height} as {entry.width} x {entry.height}{crop}: "
            f"{samples.store.captions[entry.caption]!r}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    for line in [] if step else data.stats.format_summary():
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def list_mask_warnings(stats: DataStats, train_on: Sequence[str]) -> list[str]:
    messages = []
    predictable = stats.tokens - stats.documents  # the first token of a document is never predicted
    if stats.target_tokens == 0:
        messages.append("0 % of the tokens are trained on; check dataset.train_on and the examples above")
    elif {"user", "all"} & set(train_on) and stats.target_tokens >= predictable and stats.prompt_text != PLAIN_TEXT:
        messages.append("100 % of the tokens are trained on, prompts as well as answers; check dataset.train_on")
    return messages


def _build_panel(sample: Sample, tokenizer: PreTrainedTokenizerBase, number: int, *, colors: bool) -> Panel:
    text = Text()
    documents = list(split_documents(sample))
    for index, document in enumerate(documents[:SHOWN_DOCUMENTS]):
        if index:
            text.append("\n──── next document, masked from the one above ────\n", style="cyan")
        for weight, part in decode_parts(document, tokenizer):
            style = "bold yellow" if 0 < weight < 1 else "bold green" if weight else "dim"
            part = f"{weight:g}: {part}" if 0 < weight < 1 else part
            text.append(part if colors or not weight else f"⟦{part}⟧", style=style)
        for stored in (image for images in document.images for image in images):
            image = decode_image(*(shown := read_stored_image(stored)))
            text.append(f"\n[image of {image.width} x {image.height} pixels {shown[1]}]", style="cyan")
            if colors:
                text.append(_draw_image(image))
    more = len(documents) - SHOWN_DOCUMENTS
    if more > 0:
        text.append(f"\n──── and {format_count(more, 'more document')} in this pack ────", style="cyan")
    tokens, trained_tokens = len(sample.input_ids), _count_targets(documents)
    several = f", {len(sample.document_lengths)} documents" if len(sample.document_lengths) > 1 else ""
    trained = f"{trained_tokens} trained ({trained_tokens / max(tokens, 1):.0%}{', in ⟦⟧' * (not colors)})"
    return Panel(text, title=f"example {number}: {tokens} tokens{several}, {trained}")


def _draw_image(image: Any) -> Text:
    image.thumbnail((DRAWN_PIXELS, DRAWN_PIXELS))
    text = Text()
    for y in range(0, image.height, 2):
        text.append("\n")
        for x in range(image.width):
            top, bottom = image.getpixel((x, y)), image.getpixel((x, min(y + 1, image.height - 1)))
            text.append("▀", style=f"rgb{top} on rgb{bottom}".replace(", ", ","))
    return text


def _compute_stats(samples: list[Sample], data: DataStats) -> DataStats:
    documents = [document for sample in samples for document in split_documents(sample)]
    return DataStats(
        records=len(documents),
        documents=len(documents),
        samples=len(samples),
        tokens=sum(len(document.input_ids) for document in documents),
        target_tokens=_count_targets(documents),
        max_length=data.max_length,
        prompt_text=data.prompt_text,
    )


def _count_targets(documents: Iterable[Sample]) -> int:
    """Count the tokens that contribute to the loss; the first token of a document never does."""
    return sum(weight > 0 for document in documents for weight in document.loss_weights[1:])
