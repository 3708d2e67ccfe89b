"""llama.cpp's own server in this process (from the xllamacpp wheel), to check GGUF files."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import torch
import xllamacpp


class LlamaCpp:
    """A GGUF model computed in 32 bits, including cache and attention."""

    def __init__(self, model: Path, context: int = 256, *, adapter: Path | None = None) -> None:
        settings = xllamacpp.CommonParams()
        settings.model.path = str(model)
        if adapter is not None:
            added = xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)
            settings.lora_adapters = [added]
        settings.n_ctx, settings.n_parallel = context, 1
        settings.warmup = settings.fit_params = False
        settings.verbosity = 1  # errors
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(settings)
        [self.letter] = self.tokens("a", begin=False)[-1:]

    def post(self, path: str, **body: object) -> Any:
        """Return the server's answer at a path; raises urllib.error.HTTPError."""
        request = urllib.request.Request(
            self.server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def tokens(self, text: str, *, begin: bool = True) -> list[int]:
        """Tokenize a text as the server tokenizes prompts, with special tokens parsed."""
        return list(self.post("/tokenize", content=text, add_special=begin, parse_special=True)["tokens"])

    def chat(self, messages: list[dict[str, str]]) -> str:
        """Format messages by the file's chat template, without the initial token."""
        return str(self.post("/apply-template", messages=messages)["prompt"])

    def next_token(self, tokens: list[int], size: int) -> torch.Tensor:
        """Return log-probabilities [size] of the next token."""
        # The bias forces a letter: the server reports nothing for a token that is part of a character. The reported
        # probabilities are those before the bias.
        answer = self.complete(tokens, n_predict=1, n_probs=size, logit_bias=[[self.letter, 100.0]])
        values = torch.full((size,), float("nan"))
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            values[entry["id"]] = entry["logprob"]
        return values

    def complete(self, tokens: list[int], **options: object) -> Any:
        """Return the server's greedy answer to a prompt."""
        defaults = {"temperature": 0.0, "cache_prompt": False, "return_tokens": True}
        return self.post("/completion", prompt=tokens, **(defaults | options))
