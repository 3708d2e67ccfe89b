"""The command of `zerolora serve`: which server it finds, what it exports, and its errors."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.servers.test_vllm import make_base, make_run
from trainer.commands import serve


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    return make_run(root / "my run", make_base(root / "base", "llama"), {})


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An interpreter that finds packages named vllm and sglang; neither is ever started."""
    for name in ("vllm", "sglang"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def served(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    code = serve.main([*words, "--dry-run"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return shlex.split(out.splitlines()[-1])


def test_each_server_gets_its_export_once(
    run: Path, environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run), "--python", str(environment), "--port", "9000", "--options", "--max-model-len 64"]
    end = ["--host", "127.0.0.1", "--port", "9000", "--max-model-len", "64"]
    vllm = served(capsys, *words)
    assert vllm[:5] == [str(environment), "-m", serve.MODULES["vllm"], "--model", str(run.parent / "base")]
    adapter = run / "export-vllm"
    assert vllm[5:10] == ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"my run={adapter}"]
    assert vllm[-6:] == end and (adapter / "adapter_model.safetensors").exists()
    written = (adapter / "adapter_model.safetensors").stat().st_mtime_ns
    assert served(capsys, *words) == vllm
    assert (adapter / "adapter_model.safetensors").stat().st_mtime_ns == written
    sglang = served(capsys, *words, "--server", "sglang")
    assert sglang[3:7] == ["--model-path", str(run.parent / "base"), "--enable-lora", "--lora-paths"]
    merged = served(capsys, *words, "--merged")
    assert merged[3:7] == ["--model", str(run / "export-hf"), "--served-model-name", "my run"]
    program = environment.with_name("llama-server")
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    gguf = served(capsys, *words, "--server", "llama.cpp")
    assert gguf[:5] == [str(program), "-m", str(run / "export.gguf"), "--alias", "my run"]
    os.utime(run / "adapter_model.safetensors")
    assert serve.main([*words, "--dry-run"]) == 2
    assert f"{adapter}: is older than the adapter; delete the old export" in capsys.readouterr().err


def test_a_missing_server_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for words, line in (
        ([], f"--server auto: vllm and sglang not found by {sys.executable}; `pip install vllm` in a separate envir"),
        (["--server", "vllm"], "--server vllm: vllm not found by"),
        (["--server", "llama.cpp"], "--server llama.cpp: llama-server is not on PATH; install llama.cpp"),
        (["--python", "/no/such"], "--python /no/such: cannot be started; pass the path"),
    ):
        assert serve.main([str(run), *words]) == 2
        assert capsys.readouterr().err.startswith(f"error: {line}")


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        *(("--host", host, "must be a host name or IP address") for host in ("a:80", "http://a", "256.1.1.1", "*")),
        *(("--port", port, "must be a port, 1 to 65535") for port in ("0", "\u0663", "1" * 5000)),
    ],
)
def test_odd_places_to_listen_on_are_refused(
    option: str, value: str, line: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main([str(run), f"{option}={value}"])
    assert line in capsys.readouterr().err


def test_usual_places_to_listen_on_are_kept() -> None:
    assert [serve.parse_host(host) for host in ("0.0.0.0", "::1", "a-b.c")] == ["0.0.0.0", "::1", "a-b.c"]


@pytest.mark.parametrize("text", ["--x 'unclosed", "--x \\"])
def test_options_that_cannot_be_split_are_refused_before_the_export(
    text: str, run: Path, environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(run.iterdir())
    with pytest.raises(SystemExit, match="2"):
        serve.main([str(run), "--python", str(environment), "--options", text, "--dry-run"])
    line = f"error: --options={text}: a quote is not closed, or it ends in a backslash; see `zerolora serve"
    assert capsys.readouterr().err.startswith(line)
    assert set(run.iterdir()) == before
