"""`zerolora serve` with vLLM itself on the CPU: its API gives the tokens of transformers with PEFT."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from tests.servers.test_vllm import NEW_TOKENS, PROMPTS, load, log_probabilities, make_base, make_run, vllm_folder
from trainer.contract.rendezvous import find_free_port

pytestmark = pytest.mark.nightly
__all__ = ["vllm_folder"]
START_S = 300
VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    return make_run(root / "my-run", make_base(root / "base", "llama"), {})


def ask(url: str, body: dict[str, object] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def serve(run: Path, options: Sequence[str], variables: Mapping[str, str], log: Path, start_s: float) -> Iterator[str]:
    """Run `zerolora serve` on a free port within the block, which gets the server's address once it answers."""
    port = find_free_port()
    command = [sys.executable, "-m", "launcher.cli", "serve", str(run), *options, "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(command, env=os.environ | variables, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + start_s
        while server.poll() is None and time.monotonic() < deadline:
            try:
                ask(f"http://127.0.0.1:{port}/v1/models")
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        else:
            pytest.fail(log.read_text()[-4000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module", params=["adapter", "merged"])
def url(request: pytest.FixtureRequest, run: Path, vllm_folder: Path) -> Iterator[str]:
    options = ["--server", "vllm", "--options", "--dtype float32 --enforce-eager --max-model-len 128"]
    options += ["--python", str(vllm_folder / "bin" / "python"), *["--merged"] * (request.param == "merged")]
    with serve(run, options, VARIABLES, run.parent / f"{request.param}.log", START_S) as address:
        yield f"{address}/v1"


def test_the_api_answers_as_peft_does(run: Path, url: str) -> None:
    assert "my-run" in [model["id"] for model in ask(f"{url}/models")["data"]]
    expected = log_probabilities(PeftModel.from_pretrained(load(run.parent / "base"), str(run)).eval())
    asked = {
        "model": "my-run",
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    for prompt, rows in zip(PROMPTS, expected, strict=True):
        [answer] = ask(f"{url}/completions", {**asked, "prompt": prompt})["choices"]
        assert answer["token_ids"] == rows.argmax(-1).tolist()
