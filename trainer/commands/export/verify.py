"""`zerolora export --verify`: compare the exported adapter with the trained one by the logits of 16 prompts.

Three models run in 32 bits on the CPU: the base, the trained model, and the base with the exported files as the server
would apply them. PEFT and llama.cpp (if the xllamacpp wheel is installed) are run themselves; vLLM and SGLang, which
need a GPU, are emulated by readers.py.
"""

import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from trainer.checkpoint.finished_run import FinishedRun, attach_adapter, load_full_base
from trainer.commands.export.gguf import write_gguf
from trainer.commands.export.readers import add_updates, read_llama_cpp, read_sglang, read_vllm
from trainer.config import UserError
from trainer.contract.known_versions import require
from trainer.memory.bytes import GIB
from trainer.model.base import match_vocabulary
from trainer.model.served_layers import NAMES
from trainer.parallel.ranks.group import set_seed

PROMPTS = (
    "The capital of France is", "Write a short poem about the sea.", "def fibonacci(n):\n    if n < 2:",
    "Explain in one sentence why the sky is blue.", "2 + 2 * 10 =", "Translate to German: good morning, my friend.",
    "Once upon a time there was a small dog who", "SELECT name, age FROM people WHERE", "What is the boiling point?",
    "Dear customer,\nthank you for your letter of 3 May.", "Les enfants jouent dans le jardin et", "1, 1, 2, 3, 5, 8,",
    "Der Zug nach Hamburg hat heute", "{\"name\": \"Ada\", \"born\": 1815, \"known for\":", "私は毎朝コーヒーを",
    "Question: how many legs has a spider?\nAnswer:",
)  # fmt: skip
LONGEST, COMPARED = 48, 4
"""Tokens per prompt, and how many of its last positions are compared."""
FRACTION, ROUNDING = 1e-3, 1e-4
"""Tolerance relative to the adapter's effect, and absolute."""
COPIES = 3
READERS = {"vllm": read_vllm, "sglang": read_sglang, "gguf-lora": read_llama_cpp}


@dataclass(frozen=True)
class Comparison:
    """Largest differences of logits."""

    error: float
    """Between the exported and the trained model."""
    effect: float
    """Between the trained model and the base."""
    by: str

    def check(self) -> str:
        """Return a line to print. Raises RuntimeError if the exported adapter is not the trained one."""
        found = f"on {len(PROMPTS)} prompts logits differ by {self.error:.2g} from the trained model's"
        moved = f"the adapter changes them by up to {self.effect:.2g}"
        if not self.effect > 10 * ROUNDING:
            raise RuntimeError(f"not verified: {moved}, too little to see whether it is applied")
        if not self.error <= FRACTION * self.effect + ROUNDING:
            raise RuntimeError(f"not what was trained: read by {self.by}, {found}, and {moved}; nothing was exported")
        return f"verified by {self.by}: {found}; {moved}"


def verify(run: FinishedRun, form: str, exported: Path, tokenizer: Any) -> str:
    """Return a line on how close the exported files are to the trained model.

    Raises RuntimeError if they differ, UserError if the host has too little memory for the comparison.
    """
    base = _base(run, tokenizer)
    _check_memory(base)
    prompts = [tokenizer(text).input_ids[:LONGEST] for text in PROMPTS]
    before = logits(base, prompts)
    exported_logits, by = _exported(run, form, exported, base, tokenizer, prompts)
    trained = logits(attach_adapter(base, tokenizer, run, in_32_bits=True), prompts)
    if exported_logits.dim() == 2:  # llama.cpp reports probabilities of the next token only
        trained, before = trained[:, -1].log_softmax(-1), before[:, -1].log_softmax(-1)
    return Comparison(_max_abs(exported_logits - trained), _max_abs(trained - before), by).check()


def logits(model: Any, prompts: list[list[int]]) -> Tensor:
    """Return logits of the last positions [prompts, COMPARED, vocabulary]."""
    with torch.no_grad():
        answers = [model(input_ids=torch.tensor([tokens]), use_cache=False).logits for tokens in prompts]
    return torch.stack([answer[0, -COMPARED:].float() for answer in answers])


def _exported(
    run: FinishedRun, form: str, exported: Path, base: Any, tokenizer: Any, prompts: list[list[int]]
) -> tuple[Tensor, str]:
    """Return logits of the base with the exported files, and what computed them."""
    if form == "peft":
        from peft import PeftModel

        return logits(PeftModel.from_pretrained(_base(run, tokenizer), str(exported)).eval(), prompts), "PEFT"
    if form == "gguf-lora" and (answers := _run_llama_cpp(base, tokenizer, exported, prompts)) is not None:
        return answers, "llama.cpp"
    return logits(emulate_server(base, form, exported), prompts), f"the rules of {NAMES[form]}"


def emulate_server(base: Any, form: str, exported: Path) -> Any:
    """Return the base with the server's updates of its checkpoint's tensors."""
    from transformers import core_model_loading

    revert = require(core_model_loading, "revert_weight_conversion", "transformers")
    stored: dict[str, Tensor] = dict(revert(base, dict(base.state_dict())))
    if not add_updates(stored, READERS[form](exported, stored, base.config), base.config.get_text_config().model_type):
        raise RuntimeError(f"{exported}: holds no layer")
    own = {name: value.clone() for name, value in stored.items()}
    attention = base.config._attn_implementation
    return type(base).from_pretrained(None, config=base.config, state_dict=own, attn_implementation=attention).eval()


def _run_llama_cpp(base: Any, tokenizer: Any, adapter: Path, prompts: list[list[int]]) -> Tensor | None:
    """Return log-probabilities of the next token; None without xllamacpp, or for an unsupported base."""
    if not find_spec("xllamacpp"):
        return None
    from trainer.commands.export.llama_cpp import LlamaCpp

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base.save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
        try:
            write_gguf(folder / "base", folder / "base.gguf", dtype="f32")
        except UserError:
            return None
        model = LlamaCpp(folder / "base.gguf", adapter=adapter)
        rows = base.get_output_embeddings().weight.shape[0]
        return torch.stack([model.next_token(tokens, rows) for tokens in prompts])


def _base(run: FinishedRun, tokenizer: Any) -> Any:
    base = load_full_base(run, torch.float32)
    set_seed(run.config.seed)  # rows of added tokens are random
    match_vocabulary(base, tokenizer)
    return base.eval()


def _check_memory(base: Any) -> None:
    size = 4 * sum(parameter.numel() for parameter in base.parameters())
    free = psutil.virtual_memory().available
    if (COPIES - 1) * size > free:
        raise UserError(
            f"--verify: keeps {COPIES} copies of the model in 32 bits, {COPIES * size / GIB:.1f} GiB, and this host "
            f"has {free / GIB:.1f} GiB free besides the first; verify on a larger host"
        )


def _max_abs(difference: Tensor) -> float:
    return float(difference.abs().max())
