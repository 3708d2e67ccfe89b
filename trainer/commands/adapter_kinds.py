"""What merge, export and push do with an adapter, by the kind of its model."""

from pathlib import Path
from typing import Protocol

from trainer.checkpoint.finished_run import FinishedRun, saved_tokenizer
from trainer.commands.export.adapters import ADAPTER_FORMS, export_adapter
from trainer.commands.export.merged import export_gguf
from trainer.commands.image_adapter import ImageAdapter
from trainer.commands.merged_model import merge
from trainer.model.integer_weights import Integers
from trainer.model.tokenizer_files import tokenizer_files, write_files
from trainer.setup.kinds import ImageKind, LanguageKind, kind_of_adapter
from trainer.setup.text_run import find_task


class AdapterKind(Protocol):
    """What commands do with an adapter of one kind of models."""

    @staticmethod
    def merge(run: FinishedRun, output: Path, *, dtype: str, scale: float, quantize: Integers | None) -> str:
        """Write the merged model; return what to print."""

    @staticmethod
    def export(run: FinishedRun, form: str, output: Path, *, dtype: str) -> list[str]:
        """Write the adapter in one of the formats of its task; return what to print."""

    @staticmethod
    def copy_companions(run: FinishedRun, folder: Path) -> None:
        """Write the files that an uploaded adapter needs into `folder`."""


class TextAdapter:
    """An adapter of a language model."""

    @staticmethod
    def merge(run: FinishedRun, output: Path, *, dtype: str, scale: float, quantize: Integers | None) -> str:
        merge(run, output, dtype=dtype, scale=scale, quantize=quantize)
        auto = find_task(run.config).auto_class
        return f"merged model written to {output}; load it with {auto}.from_pretrained({str(output)!r})"

    @staticmethod
    def export(run: FinishedRun, form: str, output: Path, *, dtype: str) -> list[str]:
        if form in ADAPTER_FORMS:
            return export_adapter(run, form, output)
        if form == "hf":
            merge(run, output, dtype={"f32": "fp32", "f16": "fp16"}.get(dtype, dtype))
            return ["AutoModelForCausalLM.from_pretrained, vLLM and text-generation-inference load it"]
        return export_gguf(run, form, output, dtype=dtype)

    @staticmethod
    def copy_companions(run: FinishedRun, folder: Path) -> None:
        write_files(tokenizer_files(saved_tokenizer(run)), folder)


KINDS: dict[object, type[AdapterKind]] = {LanguageKind: TextAdapter, ImageKind: ImageAdapter}


def adapter_kind(run: FinishedRun) -> type[AdapterKind]:
    """Return the kind of a finished run's adapter."""
    return KINDS[kind_of_adapter(run)]
