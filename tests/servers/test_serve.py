"""`zerolora serve` with vLLM itself on the CPU: its API gives the tokens of transformers with PEFT."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from tests.servers.test_vllm import NEW_TOKENS, PROMPTS, load, log_probabilities, make_base, make_run, vllm_folder
from trainer.contract.rendezvous import free_port

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


@pytest.fixture(scope="module", params=["adapter", "merged"])
def url(request: pytest.FixtureRequest, run: Path, vllm_folder: Path) -> Iterator[str]:
    port, log = free_port(), run.parent / f"{request.param}.log"
    options = "--dtype float32 --enforce-eager --max-model-len 128"
    command = [sys.executable, "-m", "launcher.cli", "serve", str(run), "--server", "vllm", "--options", options]
    command += ["--python", str(vllm_folder / "bin" / "python"), "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, *["--merged"] * (request.param == "merged")],
            env=os.environ | VARIABLES, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while server.poll() is None and time.monotonic() < deadline:
            try:
                ask(f"http://127.0.0.1:{port}/v1/models")
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        else:
            pytest.fail(log.read_text()[-4000:])
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


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
