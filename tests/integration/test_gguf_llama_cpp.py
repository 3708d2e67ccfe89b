"""GGUF files as llama.cpp reads them: the tokens and the next token's probabilities are those of transformers."""

import os
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from examples.demo import demo_model
from tests.tiny import CHATML
from tests.unit.test_after_run import make_run
from tests.unit.test_experts_exported import make_run as make_trained
from tests.unit.test_gguf import LLAMA3, MODELS, byte_level, make_saved, sentencepiece_like
from trainer.checkpoint.finished_run import find_run
from trainer.commands.export.__main__ import export, main
from trainer.commands.export.gguf import write_gguf
from trainer.commands.merged_model import merge

pytest.importorskip("xllamacpp", reason="needs llama.cpp from the wheel xllamacpp, of the extra dev")

from tests.llama_cpp import LlamaCpp

WINDOW = 32
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    **MODELS,
    "llama, stretched frequencies": ("llama", {"rope_parameters": LLAMA3}),
    "llama, stretched positions": ("llama", {"rope_parameters": LINEAR}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 32, "rms_norm_eps": 1e-3}),
    "llama, fast frequencies": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "mistral, a window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, stretched positions": ("qwen2", {"rope_parameters": LINEAR}),
}
# Rounding of 32-bit sums; what is wrong with an epsilon of 1e-5 instead of 1e-6 already differs by 6e-3.
EXACT = 1e-5
TEXTS = [
    "Hello world", "the red cat runs", "  two  spaces", "   leading", "trailing   ", "a\nb\n\nc\n\n\nd", "\t tab\ttab",
    "12345 1234567 3.14 1,000 x1y22z333", "2024-05-17", "don't I'll WE'RE it'S", "\u00fcber na\u00efve caf\u00e9",
    "日本語のテキスト", "Привет мир", "😀 emoji 👩‍👩‍👧", "def f(x):\n    return x**2", "!!! ???...", "",
    "\u00a0nbsp\u2009thin",
    "½ ² ٣ Ⅷ", "مرحبا بالعالم", "हिन्दी", "\r\nwin\r\n", "    ", "\n", "qz is qz", "foo  <|im_start|>  bar",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|> b", "word<|endoftext|>word",
]  # fmt: skip
CHATS = [
    [{"role": "user", "content": "the  cat, 42?"}],
    [{"role": role, "content": f"the {role}"} for role in ("system", "user", "assistant", "user")],
]


def distances(model: LlamaCpp, folder: Path, lengths: tuple[int, ...] = (1, 10, 100)) -> list[float]:
    """The largest difference of a logarithm of a next token's probability from transformers', for each length."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size = reference.config.vocab_size
    tokens = torch.randint(384, (1, max(lengths)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(tokens).logits[0].log_softmax(-1)
    found = [model.next_token(tokens[0, :length].tolist(), size) for length in lengths]
    return [float((value - expected[length - 1]).abs().max()) for value, length in zip(found, lengths, strict=True)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_next_token_is_as_likely(name: str, tmp_path: Path) -> None:
    folder = make_saved(tmp_path / "model", *ARCHITECTURES[name])
    write_gguf(folder, tmp_path / "model.gguf", dtype="auto")
    model = LlamaCpp(tmp_path / "model.gguf")
    lengths = (1, 10, WINDOW - 1) if "window" in name else (1, 10, 100)
    assert max(distances(model, folder, lengths)) < EXACT


def test_where_a_window_would_begin_to_slide_the_context_ends(tmp_path: Path) -> None:
    """llama.cpp has no sliding window for Mistral: it would compute something else from there on."""
    folder = make_saved(tmp_path / "model", *ARCHITECTURES["mistral, a window"])
    write_gguf(folder, tmp_path / "model.gguf", dtype="auto")
    with pytest.raises(HTTPError, match="400"):
        LlamaCpp(tmp_path / "model.gguf").complete(list(range(WINDOW + 1)), n_predict=1)


# What the formats round weights to, and what llama.cpp then rounds the activations to; the logarithms span 0.8.
@pytest.mark.parametrize(("dtype", "bound"), [("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 2e-2)])
def test_every_format_is_read(dtype: str, bound: float, tmp_path: Path) -> None:
    # 48 is not a multiple of 32: tensors that Q8_0 cannot store are in 16 bits.
    folder = make_saved(tmp_path / "model", "llama", {"intermediate_size": 48})
    write_gguf(folder, tmp_path / "model.gguf", dtype=dtype)
    assert EXACT < max(distances(LlamaCpp(tmp_path / "model.gguf"), folder)) < bound


def write_with(tokenizer: PreTrainedTokenizerFast, folder: Path, model_type: str = "llama") -> Path:
    saved = make_saved(folder / "model", model_type, {})
    tokenizer.save_pretrained(saved)
    write_gguf(saved, folder / "model.gguf", dtype="f32")
    return saved


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2"])
def test_texts_and_chats_become_the_same_tokens(name: str, tmp_path: Path) -> None:
    folder = make_saved(tmp_path / "plain", "llama", {})
    tokenizer = AutoTokenizer.from_pretrained(folder) if name == "gpt-2" else byte_level(name)
    tokenizer.chat_template = CHATML
    saved = write_with(tokenizer, tmp_path, "qwen2" if name == "qwen2" else "llama")
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = LlamaCpp(tmp_path / "model.gguf")
    for text in TEXTS:
        assert model.tokens(text) == tokenizer(text).input_ids, text
    for chat in CHATS:
        assert model.chat(chat) == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert model.tokens(model.chat(chat)) == tokens_of(tokenizer, chat)


def tokens_of(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def test_texts_become_the_same_tokens_of_sentencepiece(tmp_path: Path) -> None:
    saved = write_with(sentencepiece_like(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = LlamaCpp(tmp_path / "model.gguf")
    for text in [*TEXTS, "<s>[INST] hi [/INST] yes</s>", "</s>the cat", "\u2581 under", "<0x41>"]:
        assert model.tokens(text) == tokenizer(text).input_ids, text


TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("legacy", [True, False], ids=["a space before every text", "before the first"])
@pytest.mark.parametrize("start", ["{{ bos_token }}", ""], ids=["<s> begins chats", "not"])
def test_chats_become_the_same_tokens_of_sentencepiece(legacy: bool, start: str, tmp_path: Path) -> None:
    """Where the space is put before the first text only, llama.cpp has a rule for it if that text is never there."""
    from tokenizers.processors import TemplateProcessing

    source = sentencepiece_like(legacy=legacy)
    source.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    source.chat_template = start + TURNS
    tokenizer = AutoTokenizer.from_pretrained(write_with(source, tmp_path))
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id, "what llama.cpp must not do to chats without it"
    model = LlamaCpp(tmp_path / "model.gguf")
    same = [model.tokens(model.chat(chat)) == tokens_of(tokenizer, chat) for chat in CHATS]
    assert same == ([True, False] if start == "" and not legacy else [True, True])


def test_answers_end_where_the_chat_template_ends_turns(tmp_path: Path) -> None:
    source = byte_level("smollm")
    source.add_tokens(["<turn-ends>"], special_tokens=True)
    source.chat_template = CHATML.replace("<|im_end|>", "<turn-ends>")
    saved = write_with(source, tmp_path)
    end = AutoTokenizer.from_pretrained(saved).convert_tokens_to_ids("<turn-ends>")
    model = LlamaCpp(tmp_path / "model.gguf")
    assert model.complete([5, 6], n_predict=5, logit_bias=[[end, 100.0]])["stop_type"] == "eos"
    assert model.complete([5, 6], n_predict=5, logit_bias=[[model.letter, 100.0]])["stop_type"] == "limit"


def test_a_run_is_exported_as_the_merged_model(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    assert main([str(run_dir), "--format", "gguf", "--output", str(tmp_path / "model.gguf")]) == 0
    model = LlamaCpp(tmp_path / "model.gguf")
    assert max(distances(model, merge(find_run(run_dir), tmp_path / "merged"))) < EXACT
    assert max(distances(model, tmp_path / "model")) > 1e-3, "the base alone is another model"
    assert model.post("/tokenize", content="<|im_end|>", parse_special=True)["tokens"] == [2]


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [("llama", {"rslora": True}), ("mistral", {"target_modules": ["k_proj", "o_proj"]}), ("qwen3", {})],
)
def test_an_adapter_is_applied_by_llama_cpp_itself(model_type: str, lora: dict[str, Any], tmp_path: Path) -> None:
    """`--lora`: the next token is as likely as the merged model finds it."""
    base = make_saved(tmp_path / "base", model_type, {})
    run, _ = make_trained(tmp_path, model_type, base=base, **lora)
    export(find_run(run), "gguf-lora", tmp_path / "adapter.gguf")
    write_gguf(base, tmp_path / "base.gguf", dtype="f32")
    model = LlamaCpp(tmp_path / "base.gguf", adapter=tmp_path / "adapter.gguf")
    assert max(distances(model, merge(find_run(run), tmp_path / "merged"))) < 1e-4
    assert max(distances(model, base)) > 1e-2, "the base alone is another model"


@pytest.mark.nightly
def test_a_real_model_with_an_adapter_answers_the_same(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct: probabilities of all 49,152 tokens after chats and texts, and 24 greedy tokens."""
    cache = Path(os.environ.get("ZEROLORA_CACHE") or "~/.cache/zerolora").expanduser()
    run_dir = make_run(tmp_path, base=demo_model(cache))
    merged = merge(find_run(run_dir), tmp_path / "merged")
    assert main([str(run_dir), "--format", "gguf", "--dtype", "f32", "--output", str(tmp_path / "model.gguf")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(merged)
    reference = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    model = LlamaCpp(tmp_path / "model.gguf")
    for text in TEXTS:
        assert model.tokens(text) == tokenizer(text).input_ids, text
    for chat in CHATS:
        assert model.tokens(model.chat(chat)) == tokens_of(tokenizer, chat)
    for tokens in (tokens_of(tokenizer, CHATS[0]), tokenizer("Once upon a time, in 1999,").input_ids):
        prompt = torch.tensor([tokens])
        with torch.no_grad():
            expected = reference(prompt).logits[0, -1].log_softmax(-1)
            answer = reference.generate(prompt, max_new_tokens=24, do_sample=False)[0, len(tokens) :].tolist()
        assert float((model.next_token(tokens, len(expected)) - expected).abs().max()) < 1e-3
        assert model.complete(tokens, n_predict=24)["tokens"] == answer
