"""Text encoders that are trained along with the denoiser, called in every step by the pipeline's own code.

Only CLIP encoders can be trained, because diffusers loads no adapters of others. The output of frozen encoders is
cached.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.tasks.images.families import Conditions, Family
from trainer.tasks.images.pipeline import Pipeline

TRAINED = "CLIPTextModel"
"""Prefix of the classes that can be trained, with and without a projection."""


def trained_encoders(pipeline: Pipeline) -> dict[str, str]:
    """Return the text encoders of a pipeline that can be trained, as {name: class in transformers}."""
    listed = pipeline.index
    classes = {name: str(listed[name][1]) for name in pipeline.family.text_encoders if listed.get(name)}
    return {name: kind for name, kind in classes.items() if kind.startswith(TRAINED)}


def empty_encoders(pipeline: Pipeline) -> dict[str, Any]:
    """Build the modules of the trainable text encoders without memory for weights."""
    import transformers
    from accelerate import init_empty_weights

    made: dict[str, nn.Module] = {}
    if pipeline.folder is None:
        return made
    for name, kind in trained_encoders(pipeline).items():
        assert pipeline.folder is not None
        model = getattr(transformers, kind)
        with init_empty_weights(include_buffers=False):
            made[name] = model(model.config_class.from_pretrained(pipeline.folder / name, local_files_only=True))
    return made


def cut_captions(pipeline: Pipeline, captions: Sequence[str]) -> list[str]:
    """Return a line for each token limit that captions exceed, with the text encoders that have it."""
    import diffusers
    import transformers

    if pipeline.folder is None:
        return []
    listed = pipeline.index
    encode = inspect.signature(getattr(diffusers, pipeline.family.pipeline).encode_prompt)
    readers: dict[int, list[str]] = {}
    too_long: dict[int, int] = {}
    for name in pipeline.family.text_encoders:
        part = name.replace("text_encoder", "tokenizer")
        if None in listed.get(part, [None]):
            continue
        with pipeline.reading(f"its {part}"):
            tokenizer: Any = getattr(transformers, listed[part][1]).from_pretrained(pipeline.folder / part)
        is_clip = listed[part][1].startswith("CLIP")
        limit = tokenizer.model_max_length if is_clip else encode.parameters["max_sequence_length"].default
        lengths = [len(ids) for ids in tokenizer(list(captions)).input_ids]
        readers.setdefault(limit, []).append(name)
        too_long[limit] = max(too_long.get(limit, 0), sum(length > limit for length in lengths))
    more = [f"; {' and '.join(names)} read up to {limit}" for limit, names in readers.items() if not too_long[limit]]
    return [
        f"{count:,} of {len(captions):,} captions have more than the {limit} tokens read by "
        f"{' and '.join(readers[limit])}, and are cut there{''.join(more)}"
        for limit, count in too_long.items()
        if count
    ]


class EncoderFiles:
    """The weights of text encoders, named as in the whole model; an encoder is read when its first tensor is needed."""

    def __init__(self, pipeline: Pipeline, encoders: dict[str, nn.Module]) -> None:
        self._pipeline, self._empty = pipeline, encoders
        self._read: dict[str, dict[str, Tensor]] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            f"{part}.{name}": tuple(tensor.shape)
            for part, encoder in self._empty.items()
            for name, tensor in encoder.state_dict().items()
        }

    def read(self, name: str) -> Tensor:
        """Read one tensor to the CPU, in its stored dtype; transformers translates old names of stored weights."""
        part, _, own = name.partition(".")
        if part not in self._read:
            self._read[part] = self._pipeline.text_encoder(part, "auto").state_dict()
        return self._read[part][own]


class Captions:
    """Encodes captions if some of the text encoders are trained."""

    def __init__(self, pipeline: Pipeline, denoiser: nn.Module, encoders: dict[str, nn.Module]) -> None:
        self._family: Family = pipeline.family
        self._library = pipeline.around(denoiser, encoders)
        self._zeros = bool(self._library.config.get("force_zeros_for_empty_prompt"))

    def encoded(self, captions: Sequence[str], cached: Conditions) -> Conditions:
        """Return `cached` [B, ...], with the conditions of trained encoders recomputed."""
        some = next(iter(cached.values()))
        assert self._family.encode_trained is not None, "a pipeline without CLIP was refused"
        found = self._family.encode_trained(self._library, captions, cached)
        if self._zeros:  # this pipeline uses zeros for an empty negative prompt
            shown = torch.tensor([bool(caption) for caption in captions], device=some.device)
            found = {name: value * shown.view(-1, *(1,) * (value.dim() - 1)) for name, value in found.items()}
        return cached | {name: value.to(some.dtype) for name, value in found.items()}
