"""Adapters for other programs: the merged weights, one file or a folder each, and one line for every mistake."""

import shlex
from pathlib import Path

import numpy
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import CHATML, record_base
from tests.unit.test_after_run import make_run
from tests.unit.test_gguf import logits_of, make_saved, sentencepiece_like
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer
from trainer.commands.export.__main__ import main
from trainer.commands.export.ollama import build_modelfile, derive_chat_parts
from trainer.commands.merged_model import merge


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def test_a_run_becomes_a_gguf_file_with_the_merged_weights(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "sub" / "tiny.gguf"
    assert main([str(run_dir), "--format", "gguf", "--output", str(output)]) == 0
    assert "in f32, written by the gguf package" in capsys.readouterr().out
    assert [path.name for path in output.parent.iterdir()] == ["tiny.gguf"], "no temporary files remain"
    merged = merge(find_run(run_dir), tmp_path / "merged")
    weights = load_file(merged / "model.safetensors")
    read = {tensor.name: torch.from_numpy(numpy.array(tensor.data)) for tensor in GGUFReader(output).tensors}
    assert len(read) == len(weights)
    names = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    for number in (0, 1):
        layer = f"model.layers.{number}"
        names |= {
            f"blk.{number}.attn_v.weight": f"{layer}.self_attn.v_proj.weight",
            f"blk.{number}.attn_output.weight": f"{layer}.self_attn.o_proj.weight",
            f"blk.{number}.ffn_gate.weight": f"{layer}.mlp.gate_proj.weight",
            f"blk.{number}.ffn_up.weight": f"{layer}.mlp.up_proj.weight",
            f"blk.{number}.ffn_down.weight": f"{layer}.mlp.down_proj.weight",
            f"blk.{number}.attn_norm.weight": f"{layer}.input_layernorm.weight",
        }
    for name, original in names.items():
        assert torch.equal(read[name], weights[original]), name
    # Row 2 i + j of a head is row i + j n / 2 of transformers': 4 heads of 16 rows.
    order = [head * 16 + j * 8 + i for head in range(4) for i in range(8) for j in range(2)]
    assert torch.equal(read["blk.0.attn_q.weight"], weights["model.layers.0.self_attn.q_proj.weight"][order])
    # The same weights, read from another place in memory: a rounding or two in 32 bits.
    torch.testing.assert_close(logits_of(output.parent, gguf_file=output.name), logits_of(merged), atol=5e-8, rtol=3e-7)


def test_differences_in_llama_cpp_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_saved(tmp_path / "base", "mistral", {"sliding_window": 64})
    tokenizer = sentencepiece_like(legacy=False)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained(base)
    assert main([str(make_run(tmp_path, base=base)), "--format", "gguf", "--output", str(tmp_path / "a.gguf")]) == 0
    said = capsys.readouterr().out
    assert "context limited to 64 tokens: llama.cpp does not support this model's sliding window" in said
    assert "handles spaces after special tokens differently" in said


def test_peft_reads_what_is_exported_for_it(run_dir: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    assert main([str(run_dir), "--format", "peft", "--output", str(tmp_path / "out")]) == 0
    base = run_dir.parent / "model"
    tokens = torch.arange(3, 30)[None]
    logits = []
    for folder in (run_dir, tmp_path / "out"):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHATML


def test_hf_is_the_merged_model(run_dir: Path, tmp_path: Path) -> None:
    assert main([str(run_dir), "--format", "hf", "--output", str(tmp_path / "out")]) == 0
    merged = merge(find_run(run_dir), tmp_path / "merged")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()


def test_ollama_gets_the_file_and_a_template(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir), "--format", "ollama", "--output", str(tmp_path / "my out")]) == 0
    assert shlex.split(capsys.readouterr().out.splitlines()[-1])[-1] == f"{tmp_path}/my out/Modelfile"
    assert sorted(path.name for path in (tmp_path / "my out").iterdir()) == ["Modelfile", "model.gguf"]
    text = (tmp_path / "my out" / "Modelfile").read_text()
    assert text.startswith('FROM ./model.gguf\nTEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}')
    assert "<|im_start|>user\n{{ .Content }}<|im_end|>\n" in text
    assert text.endswith('<|im_start|>assistant\n"""\nPARAMETER stop "<|im_end|>"\n')


DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As Gemma has it: the system turn goes into the user's.
FOLDS = (
    "{% if messages[0].role == 'system' %}{% set first, rest = messages[0].content + ' ', messages[1:] %}{% else %}"
    "{% set first, rest = '', messages %}{% endif %}{% for m in rest %}[{{ m.role }}]{{ first if loop.first }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
BRACE = "{% for m in messages %}{{ m.role }}: {{ '{' }}{{ m.content }}}\n{% endfor %}"
BRACE += "{% if add_generation_prompt %}assistant: {{ '{' }}{% endif %}"
COUNTS = "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ""),
        (DEFAULT_SYSTEM, "<|im_start|>system\nBe kind.<|im_end|>\n"),
        (NO_SYSTEM, ""),
        (COUNTS, None),
        (FOLDS, None),
        (BRACE, None),
        (CHATML.replace("\n", "\u00a0"), None),
    ],
    ids=["chatml", "default system", "no system", "more than turns", "folded", "braces run together", "not printable"],
)
def test_a_chat_template_becomes_one_of_turns_only_if_it_is_one(
    template: str, expected: str | None, run_dir: Path
) -> None:
    tokenizer = load_saved_tokenizer(find_run(run_dir))
    tokenizer.chat_template = template
    parts = derive_chat_parts(tokenizer)
    assert (parts.without_system if parts else None) == expected
    text = build_modelfile("m.gguf", tokenizer, system_prompt="Short.")
    assert ('TEMPLATE """' in text) is (expected is not None) and 'SYSTEM """Short."""' in text


@pytest.mark.parametrize(
    ("form", "template"),
    [
        ("{system}{prompt}", "{{ if .System }}{{ .System }}\n\n{{ end }}{{ .Prompt }}"),
        ("Q: {prompt}\nA: ", "Q: {{ .Prompt }}\nA: "),
        ("No\u00a0break {prompt}", None),
    ],
)
def test_ollama_asks_a_run_that_trained_text_as_it_was_trained(
    form: str, template: str | None, run_dir: Path, tmp_path: Path
) -> None:
    text = build_modelfile("m.gguf", load_saved_tokenizer(find_run(run_dir)), system_prompt=None, prompt_format=form)
    assert ("TEMPLATE" in text.partition("#")[0]) is (template is not None)
    assert template is None or f'\nTEMPLATE """{template}"""\n' in text
    assert "<|im_start|>" not in text


def test_ollama_takes_the_form_that_the_run_recorded(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_base(run, find_run(run).config, prompt_text="{system}{prompt}")
    assert main([str(run), "--format", "ollama", "--output", str(tmp_path / "out")]) == 0
    assert "{{ .Prompt }}" in (tmp_path / "out" / "Modelfile").read_text()


@pytest.mark.parametrize("prompt", ["No\u00a0break.", 'Say """\nnothing.'])
def test_a_system_prompt_that_ollama_would_change_is_left_out(prompt: str, run_dir: Path) -> None:
    text = build_modelfile("m.gguf", load_saved_tokenizer(find_run(run_dir)), system_prompt=prompt)
    assert "\nSYSTEM" not in text and "\n# No SYSTEM: Ollama would change the system prompt" in text
    kept = build_modelfile(
        "m.gguf", load_saved_tokenizer(find_run(run_dir)), system_prompt='Say """so""", 😀:\n\t"yes"'
    )
    assert kept.endswith('\nSYSTEM """Say """so""", 😀:\n\t"yes""""\n')


def test_answers_stop_where_turns_end_without_a_template_too(run_dir: Path) -> None:
    tokenizer = load_saved_tokenizer(find_run(run_dir))
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = COUNTS.replace("\n", "<|im_end|>\n")
    text = build_modelfile("m.gguf", tokenizer, system_prompt=None)
    assert text.endswith('\nPARAMETER stop "<|endoftext|>"\nPARAMETER stop "<|im_end|>"\n')


def test_ollama_gets_the_variables_of_the_template(run_dir: Path) -> None:
    tokenizer = load_saved_tokenizer(find_run(run_dir))
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "{{ sign }}<|im_end|>")
    for variables, sign in ((None, ""), ({"sign": "!?"}, "!?")):
        text = build_modelfile("m.gguf", tokenizer, system_prompt=None, variables=variables)
        assert f"{{{{ .Content }}}}{sign}<|im_end|>" in text


def test_a_first_token_is_left_to_llama_cpp_only_if_encoding_puts_it(run_dir: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_saved_tokenizer(find_run(run_dir))
    tokenizer.bos_token = "<|im_start|>"
    parts = derive_chat_parts(tokenizer)
    assert parts is not None and parts.affixes["system"][0] == "<|im_start|>system\n"
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = "<|endoftext|>" + CHATML
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    parts = derive_chat_parts(tokenizer)
    assert parts is not None and parts.affixes["system"][0] == "<|im_start|>system\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--format", "hf", "--dtype", "q8_0"], "--dtype q8_0: is only for GGUF files"),
        (["--format", "peft", "--dtype", "f16"], "--dtype f16: --format peft keeps the adapter's dtype"),
        (["--format", "gguf", "--output", "."], "is a folder, but --format gguf needs a file"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], complaint: str, run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main([str(run_dir), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert complaint in captured.err
