"""Saved models as GGUF files: transformers reads the same logits from them, tokens and ranks are the tokenizer's."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.tiny import CHATML, WORDS, make_tokenizer
from trainer.commands.export.gguf import write_gguf
from trainer.commands.export.gguf_vocabulary import has_chat_tokenization_mismatch
from trainer.config import UserError

TEXTS = ["the red cat runs", "  two  spaces, 12345 and\n\na line", "<|im_start|>user\nüber 7<|im_end|>"]
SETTINGS = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 128}),
}


def make_saved(folder: Path, model_type: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SETTINGS | settings))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases begin at zero and norms at one: neither would show a mistake
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    model.to(dtype).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def logits_of(*where: Any, **options: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(*where, dtype=torch.float32, **options)
    tokens = torch.randint(384, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.as_tensor(model(tokens).logits)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_same_logits(name: str, tmp_path: Path) -> None:
    folder = make_saved(tmp_path / "model", *MODELS[name])
    assert write_gguf(folder, tmp_path / "model.gguf", dtype="auto") == "f32"
    read = logits_of(tmp_path, gguf_file="model.gguf")
    # The same weights, read from another place in memory: a rounding or two in 32 bits.
    torch.testing.assert_close(read, logits_of(folder), atol=5e-8, rtol=3e-7)


@pytest.mark.parametrize(("dtype", "error"), [("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 1e-2)])
def test_every_format_holds_the_weights_to_its_precision(dtype: str, error: float, tmp_path: Path) -> None:
    folder = make_saved(tmp_path / "model", "llama", {})
    write_gguf(folder, tmp_path / "model.gguf", dtype=dtype)
    reader = GGUFReader(tmp_path / "model.gguf")
    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    assert kinds == {GGMLQuantizationType[dtype.upper()]}
    assert {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) == 1} == {GGMLQuantizationType.F32}
    [embedding] = [tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    values = quants.dequantize(embedding.data, embedding.tensor_type)
    truth = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].numpy()
    assert 0 < numpy.abs(values - truth).max() <= error * numpy.abs(truth).max()


def test_auto_keeps_16_bits(tmp_path: Path) -> None:
    folder = make_saved(tmp_path / "model", "llama", {}, torch.bfloat16)
    assert write_gguf(folder, tmp_path / "model.gguf", dtype="auto") == "bf16"
    assert (tmp_path / "model.gguf").stat().st_size < 1.2 * (folder / "model.safetensors").stat().st_size


def test_the_stretched_frequencies_of_llama_3_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = make_saved(tmp_path / "model", "llama", {"rope_parameters": LLAMA3})
    write_gguf(folder, tmp_path / "model.gguf", dtype="f32")
    [factors] = [t.data for t in GGUFReader(tmp_path / "model.gguf").tensors if t.name == "rope_freqs.weight"]
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    expected = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    torch.testing.assert_close(plain / torch.from_numpy(numpy.array(factors)), expected)


def byte_level(digits: str) -> PreTrainedTokenizerFast:
    """A tokenizer that splits as llama.cpp's rule of that name does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from trainer.commands.export.gguf_vocabulary import MERGED_WORDS, SPLIT_NAMES, WHOLE_WORDS

    by_name = {name: pattern for pattern, name in SPLIT_NAMES.items()}
    by_name[MERGED_WORDS] = by_name[WHOLE_WORDS]
    tokenizer = Tokenizer(models.BPE(ignore_merges=digits == WHOLE_WORDS))
    if digits == "smollm":
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(by_name[digits]), "isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=digits == "smollm")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, last])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=390, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "12345 123"] * 8, trainer)
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"]["qz"] = len(state["model"]["vocab"])  # no merge makes it: only a whole word can be it
    source = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=source, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


@pytest.mark.parametrize("name", ["smollm", "llama-bpe", "smaug-bpe", "qwen2"])
def test_a_byte_level_tokenizer_is_written_under_the_name_of_its_splitting(name: str, tmp_path: Path) -> None:
    folder = make_saved(tmp_path / "model", "llama", {})
    byte_level(name).save_pretrained(folder)
    write_gguf(folder, tmp_path / "model.gguf", dtype="f32")
    found = fields(tmp_path / "model.gguf")
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", name)


def test_the_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    folder = make_saved(tmp_path / "model", "llama", {})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|endoftext|>"  # transformers 5.17 cannot read a GGUF file without one
    tokenizer.save_pretrained(folder)
    write_gguf(folder, tmp_path / "model.gguf", dtype="f32")
    found = fields(tmp_path / "model.gguf")
    tokens = found["tokenizer.ggml.tokens"]
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert len(tokens) == 400 and tokens[-1] == "[PAD399]", "a row of the embedding for each"
    assert found["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1] and found["tokenizer.ggml.token_type"][-1] == 5
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.chat_template"]) == (2, CHATML)
    assert found["tokenizer.ggml.pre"] == "gpt-2" and not found["tokenizer.ggml.add_bos_token"]
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert [read(text).input_ids for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]


def sentencepiece_like(*, legacy: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2 and TinyLlama have it: bytes as tokens, a space before a text, pairs joined by rank."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    source = Tokenizer(models.BPE(unk_token="<unk>"))
    source.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    source.train_from_iterator([" ".join(WORDS)] * 8, trainer)
    state = json.loads(source.to_str())
    specials = [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    vocabulary = {token.content: index for index, token in enumerate(specials)}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + list(state["model"]["vocab"]):
        vocabulary.setdefault(token, len(vocabulary))
    merges = [tuple(merge) for merge in state["model"]["merges"]]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    if legacy:
        tokenizer.normalizer = source.normalizer
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def test_a_sentencepiece_tokenizer_is_written_with_its_ranks(tmp_path: Path) -> None:
    fast = sentencepiece_like()
    merges = [tuple(merge) for merge in json.loads(fast.backend_tokenizer.to_str())["model"]["merges"]]
    folder = make_saved(tmp_path / "model", "llama", {})
    fast.save_pretrained(folder)
    write_gguf(folder, tmp_path / "model.gguf", dtype="f32")
    found = fields(tmp_path / "model.gguf")
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_space_prefix"] is True
    scores = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    ranked = sorted({"".join(merge) for merge in merges}, key=lambda token: -scores[token])
    assert ranked == list(dict.fromkeys("".join(merge) for merge in merges))
    types = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"], strict=True))
    assert (types["<unk>"], types["<s>"], types["<0x41>"], types["".join(merges[0])]) == (2, 3, 6, 1)
    for text in ("the red cat runs quickly", "seven blue dogs"):
        assert joined_by_score(text, scores) == fast.tokenize(text)


def joined_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """llama.cpp's rule for such tokenizers: of all neighbours that make a token join the pair with the best score."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in pairwise(symbols)]
        pairs = [(-scores[token], index) for index, token in enumerate(joined) if token in scores]
        if not pairs:
            return symbols
        _, index = min(pairs)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


@pytest.mark.parametrize(
    ("model_type", "settings", "complaint"),
    [
        ("phi3", {}, "Phi3ForCausalLM is not supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embedding of type dynamic is not supported",
        ),
        ("qwen2", {"rope_parameters": LLAMA3}, "rotary embedding of type llama3 is not supported for Qwen2"),
    ],
)
def test_what_is_not_written_here_is_refused_with_the_fix(
    model_type: str, settings: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    folder = make_saved(tmp_path / "model", model_type, settings)
    with pytest.raises(UserError, match=f"{complaint}.*convert_hf_to_gguf"):
        write_gguf(folder, tmp_path / "model.gguf", dtype="auto")


def test_another_activation_is_refused(tmp_path: Path) -> None:
    folder = make_saved(tmp_path / "model", "llama", {"hidden_act": "gelu"})
    with pytest.raises(UserError, match=r"llama.cpp uses SiLU for LlamaForCausalLM, but the model uses gelu"):
        write_gguf(folder, tmp_path / "model.gguf", dtype="auto")


@pytest.mark.parametrize(
    ("model_type", "settings", "context"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": 512}, 256),
        ("mistral", {"sliding_window": None}, 256),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, 256),
        ("qwen2", {"sliding_window": 64}, 256),
    ],
)
def test_the_context_ends_where_a_window_would_slide(
    model_type: str, settings: dict[str, Any], context: int, tmp_path: Path
) -> None:
    folder = make_saved(tmp_path / "model", model_type, settings)
    write_gguf(folder, tmp_path / "model.gguf", dtype="f32")
    found = fields(tmp_path / "model.gguf")
    assert found[f"{found['general.architecture']}.context_length"] == context


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_tokenizer_that_changes_the_text_is_refused(kind: str, tmp_path: Path) -> None:
    from tokenizers import normalizers

    tokenizer = byte_level("smollm") if kind == "byte-level" else sentencepiece_like(legacy=False)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    folder = make_saved(tmp_path / "model", "llama", {})
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"Lowercase .*convert the output"):
        write_gguf(folder, tmp_path / "model.gguf", dtype="auto")


def test_chats_that_llama_cpp_reads_otherwise_are_known() -> None:
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    for legacy, start, differ in [(True, "", False), (False, "{{ bos_token }}", False), (False, "", True)]:
        tokenizer = sentencepiece_like(legacy=legacy)
        tokenizer.chat_template = start + turns
        assert has_chat_tokenization_mismatch(tokenizer) is differ, (legacy, start)
    assert not has_chat_tokenization_mismatch(byte_level("smollm"))


def test_a_tokenizer_with_a_splitting_of_its_own_is_refused(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    folder = make_saved(tmp_path / "model", "llama", {})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"this tokenizer \(Punctuation and ByteLevel\); convert the output"):
        write_gguf(folder, tmp_path / "model.gguf", dtype="auto")
