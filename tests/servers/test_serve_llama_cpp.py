"""`zerolora serve --server llama.cpp` with llama.cpp's own server: its API gives the tokens of PEFT."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoTokenizer

from tests.servers.test_serve import ask, serve
from tests.servers.test_vllm import NEW_TOKENS, PROMPTS, load, log_probabilities, make_base, make_run

pytest.importorskip("xllamacpp", reason="needs llama.cpp from the wheel xllamacpp, of the extra dev")
START_S = 240
# The wheel has llama.cpp's server as a library. This program passes it the options that `zerolora serve` writes, and
# computes in 32 bits.
PROGRAM = """#!{python}
import argparse
import time
import xllamacpp

parser = argparse.ArgumentParser()
for name in ("-m", "--alias", "--host", "--port", "--ctx-size"):
    parser.add_argument(name, required=True)
parser.add_argument("--jinja", action="store_true", required=True)
given = parser.parse_args()
settings = xllamacpp.CommonParams()
settings.model.path, settings.model_alias, settings.use_jinja = given.m, {{given.alias}}, given.jinja
settings.hostnames, settings.port, settings.n_ctx = [given.host], int(given.port), int(given.ctx_size)
settings.warmup = settings.fit_params = False
settings.n_parallel = settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(settings)
while True:
    time.sleep(1)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    return make_run(root / "my-run", make_base(root / "base", "llama"), {})


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    program = run.parent / "llama-server"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    variables = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    options = ["--server", "llama.cpp", "--options", "--ctx-size 128"]
    with serve(run, options, variables, run.parent / "server.log", START_S) as address:
        yield address


def test_the_api_answers_as_peft_does(run: Path, url: str) -> None:
    assert "my-run" in [model["id"] for model in ask(f"{url}/v1/models")["data"]]
    expected = log_probabilities(PeftModel.from_pretrained(load(run.parent / "base"), str(run)).eval())
    assert any(
        not rows.argmax(-1).equal(base.argmax(-1))
        for rows, base in zip(expected, log_probabilities(load(run.parent / "base")), strict=True)
    ), "the adapter changes the answers"
    options = {"n_predict": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    for prompt, rows in zip(PROMPTS, expected, strict=True):
        answer = ask(f"{url}/completion", {**options, "prompt": prompt})
        assert answer["tokens"] == rows.argmax(-1).tolist()


def test_chats_have_the_tokens_of_the_chat_template(run: Path, url: str) -> None:
    messages = [{"role": "user", "content": "red cat runs"}]
    asked = {"model": "my-run", "messages": messages, "max_tokens": 2, "temperature": 0}
    tokenizer = AutoTokenizer.from_pretrained(run.parent / "base")
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    usage = ask(f"{url}/v1/chat/completions", asked)["usage"]
    assert usage["prompt_tokens"] == len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
