"""Micro-steps replayed from CUDA graphs train as launched ones do: same losses, same adapter, same memory.

Packs of documents of one length are computed by the same kernels on the same numbers, to the bit; packs of ragged ones
are padded, which changes the order of sums. Keep the output with `pytest -s`: it has the times.
"""

import gc
import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from benchmarks.bench.cases import write_texts
from tests.runs_in_process import make_ground, train
from trainer.parallel.engine.cuda_graphs import CapturedPass, GraphCapturer, release_workspaces
from trainer.parallel.engine.flat_adapter import FlatAdapter, Member

pytestmark = pytest.mark.gpu

STEPS, LENGTH, ROUNDING = 14, 128, 6e-3
COMMON: dict[str, Any] = {
    "training__precision": "bf16",
    "training__max_steps": STEPS,
    "training__warmup_ratio": 0.0,
    "dataset__packing": True,
    "output__overwrite": "delete",
}
EVEN: dict[str, dict[str, Any]] = {
    "lora": {},
    "stage-0": {"zero__stage": 0},
    "stage-1": {"zero__stage": 1},
    "fp16": {"training__precision": "fp16"},
    "nf4": {"adapter": "qlora"},
    "dropout": {"lora__dropout": 0.1},
    "recompute": {"training__gradient_checkpointing": "non_reentrant"},
    "recompute-dropout": {"training__gradient_checkpointing": "non_reentrant", "lora__dropout": 0.1},
    "selective": {"training__gradient_checkpointing": "selective"},
    "accumulation": {"training__gradient_accumulation_steps": 2},
    "two-buffers": {"lora__loraplus_lr_ratio": 4.0},
    "scu": {"scu__enabled": True, "scu__controller": "fixed"},
    "nf4-all": {
        "adapter": "qlora",
        "lora__dropout": 0.1,
        "training__gradient_checkpointing": "non_reentrant",
        "training__gradient_accumulation_steps": 2,
        "scu__enabled": True,
        "scu__controller": "fixed",
    },
}


class Trained:
    """A run that has ended."""

    def __init__(self, ground: Path, **settings: Any) -> None:
        gc.collect()
        release_workspaces()  # of the run before: each is to have its own
        torch.cuda.empty_cache()
        before, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.console = train(ground, **COMMON | settings)
        self.reserved = (torch.cuda.max_memory_reserved() - before) / 2**20
        self.peak = (torch.cuda.max_memory_allocated() - allocated) / 2**20
        lines = [json.loads(line) for line in (ground / "run" / "metrics.jsonl").read_text().splitlines()]
        records = [line for line in lines if "train/loss" in line]
        self.losses = [record["train/loss"] for record in records]
        self.graphed = [record.get("perf/graphed", -1.0) for record in records]
        # Of half the run: a step in which a shape is recorded takes five times as long.
        self.step_ms = median(record["perf/step_ms"] for record in records[len(records) // 2 :])
        self.adapter = load_file(ground / "run" / "adapter_model.safetensors")

    def graph_lines(self) -> str:
        return "\n".join(line for line in self.console.splitlines() if "CUDA graphs" in line)


def both(ground: Path, **settings: Any) -> tuple[Trained, Trained]:
    """The same run launched kernel by kernel, and replayed."""
    launched, played = (Trained(ground, **settings, training__cuda_graphs=mode) for mode in ("off", "on"))
    print(f"\n{settings}: {launched.step_ms:.1f} ms launched, {played.step_ms:.1f} replayed, graphed {played.graphed}")
    print(played.graph_lines())
    return launched, played


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ground_without_saves(tmp_path_factory.mktemp("ragged"))


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every document fills its sample."""
    folder = tmp_path_factory.mktemp("even")
    texts = write_texts(folder / "texts.jsonl", 2 * LENGTH, 200)
    return ground_without_saves(folder, path=str(texts), max_length=LENGTH, shuffle=False)


def ground_without_saves(folder: Path, **dataset: Any) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")
    ground = make_ground(folder)
    base = yaml.safe_load((ground / "base.yaml").read_text())
    base["dataset"] |= dataset
    base["training"]["save_steps"] = 0
    (ground / "base.yaml").write_text(yaml.safe_dump(base))
    return ground


@pytest.mark.parametrize("name", EVEN)
def test_documents_of_one_length_train_to_the_same_bits(even: Path, name: str) -> None:
    settings = {"training__batch_size": 2, **EVEN[name]}
    launched, played = both(even, **settings)
    assert played.graphed[-1] == 1.0, played.graph_lines()
    assert_same_bits(even, settings, launched, played)


def assert_same_bits(ground: Path, settings: dict[str, Any], launched: Trained, played: Trained) -> None:
    noise = 0.0
    if played.losses != launched.losses:  # launched twice it may differ as well
        again = Trained(ground, **settings, training__cuda_graphs="off")
        noise = largest_difference(again, launched)
        print(f"launched twice: {noise:.2g} apart")
    assert largest_difference(played, launched) <= 3 * noise


def largest_difference(one: Trained, other: Trained) -> float:
    """Over losses and adapter."""
    losses = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    return max(losses, *(float((one.adapter[name] - other.adapter[name]).abs().max()) for name in one.adapter))


KL: dict[str, dict[str, Any]] = {
    "one": {},
    "accumulation": {"training__gradient_accumulation_steps": 2},
    "base's pass in every step": {"scu__reference_cache": False},
    "all": {
        "adapter": "qlora",
        "lora__dropout": 0.1,
        "training__gradient_checkpointing": "non_reentrant",
        "training__gradient_accumulation_steps": 2,
        "training__batch_size": 2,
    },
    "controlled": {"scu__controller": "pi", "scu__target": 0.0005, "scu__deadband": 0.0},
}


def texts_of_lengths(path: Path, lengths: list[int]) -> Path:
    """As many letters each, which the tokenizer has a token for; a run adds one for the end."""
    draw = random.Random(1)
    texts = ["".join(draw.choices(string.ascii_letters, k=length)) for length in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("name", KL)
def test_steps_with_kl_are_replayed_next_to_launched_reference_text(even: Path, name: str) -> None:
    lengths = [20 + 7 * index % 61 for index in range(60)]
    settings = with_kl(texts_of_lengths(even / "reference.jsonl", lengths)) | KL[name]
    (launched, before), (played, after) = (with_records(even, mode, settings) for mode in ("off", "on"))
    print(f"\n{name}: {launched.step_ms:.1f} ms launched, {played.step_ms:.1f} replayed, graphed {played.graphed}")
    print(played.graph_lines())
    print("kl_bits", before[-1]["kl_bits"], after[-1]["kl_bits"], "lambda", before[-1]["lambda"], after[-1]["lambda"])
    assert set(played.graphed[10:]) == {1.0}, played.graph_lines()
    if name != "all":  # its dropout draws other numbers
        assert played.losses == pytest.approx(launched.losses, abs=ROUNDING)
        assert [r["kl_bits"] for r in after] == pytest.approx([r["kl_bits"] for r in before], rel=0.05, abs=1e-4)
    assert min(record["kl_bits"] for record in after[5:]) > 0
    assert played.step_ms < launched.step_ms


def with_kl(texts: Path) -> dict[str, Any]:
    """Settings of a run that is held to its base on these."""
    return {
        "training__batch_size": 1,
        "training__max_steps": 40,
        "scu__enabled": True,
        "scu__measure": "kl",
        "scu__reference": str(texts),
        "scu__reference_cache": True,
        "scu__controller": "fixed",
        "scu__lambda_start": 0.5,
    }


def with_records(ground: Path, mode: str, settings: dict[str, Any]) -> tuple[Trained, list[dict[str, float]]]:
    """A run, and the SCU's record of each step."""
    run = Trained(ground, **settings, training__cuda_graphs=mode)
    return run, json.loads((ground / "run" / "scu_metrics.json").read_text())


@pytest.mark.parametrize("settings", [{}, {"adapter": "qlora", "lora__dropout": 0.1}])
def test_ragged_documents_train_as_ever(ragged: Path, settings: dict[str, Any]) -> None:
    launched, played = both(ragged, **settings, training__batch_size=2, training__max_steps=24)
    assert sum(played.graphed) >= 3, played.graph_lines()
    if not settings:
        assert played.losses == pytest.approx(launched.losses, abs=ROUNDING)
    assert played.losses[-1] < played.losses[0]


def test_what_cannot_be_captured_is_launched_and_reported(even: Path) -> None:
    """Under a mask transformers asks the device whether documents are packed."""
    launched, played = both(even, model__attn_implementation="sdpa")
    assert max(played.graphed) == 0.0 and "synchronizes with the device" in played.graph_lines()
    assert played.losses == pytest.approx(launched.losses, abs=ROUNDING)


@pytest.mark.parametrize("captures", [0, 1, 2], ids=["in the passes before", "forward", "backward"])
def test_memory_that_runs_out_while_a_step_is_captured(
    even: Path, monkeypatch: pytest.MonkeyPatch, captures: int
) -> None:
    """The allocator gets no more from the card from there on, until the capture has failed; the run continues."""
    record, warm_up, begin = GraphCapturer.capture, GraphCapturer._warm_up, torch.cuda.graph.__enter__
    begun = []

    def no_more() -> None:
        torch.cuda.set_per_process_memory_fraction(1e-6)

    def recorded(self: GraphCapturer, compute: Callable[[], torch.Tensor], *, must_be_faster: bool) -> CapturedPass:
        try:
            return record(self, compute, must_be_faster=must_be_faster)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def warmed_up(self: GraphCapturer, compute: Callable[[], torch.Tensor]) -> None:
        if captures == 0:
            no_more()
        warm_up(self, compute)

    def begin_capture(self: torch.cuda.graph) -> None:
        begun.append(self)
        if len(begun) == captures:
            no_more()
        begin(self)

    settings = {"base_model": "random:smollm2-135m", "dataset__max_length": LENGTH, "training__batch_size": 4}
    settings |= {"lora__dropout": 0.1}
    launched = Trained(even, **settings, training__cuda_graphs="off")
    monkeypatch.setattr(GraphCapturer, "capture", recorded)
    monkeypatch.setattr(GraphCapturer, "_warm_up", warmed_up)
    monkeypatch.setattr(torch.cuda.graph, "__enter__", begin_capture)
    played = Trained(even, **settings, training__cuda_graphs="on")
    print(f"\n{played.graph_lines()}")
    assert len(begun) == captures
    assert "out of memory" in played.graph_lines() and max(played.graphed) == 0.0
    assert_same_bits(even, settings, launched, played)


@pytest.mark.parametrize("settings", [{}, {"adapter": "qlora"}])
def test_memory_and_time_of_a_small_step(even: Path, settings: dict[str, Any]) -> None:
    """What is reserved differs by more: recordings have a pool of their own, with workspaces of 32 MiB in it."""
    shape = {"base_model": "random:smollm2-135m", "dataset__max_length": LENGTH, "training__batch_size": 4}
    launched, played = both(even, **shape, **settings)
    reserved = f"reserved {launched.reserved:.0f} MiB launched, {played.reserved:.0f} MiB replayed"
    print(f"{settings}: peak {launched.peak:.0f} and {played.peak:.0f} MiB, {reserved}")
    assert played.graphed[-1] == 1.0, played.graph_lines()
    assert played.peak < 1.05 * launched.peak
    assert played.reserved < 1.05 * launched.reserved + 3 * 32
    assert played.step_ms < launched.step_ms


def test_auto_captures_host_bound_steps(even: Path) -> None:
    small = Trained(even, training__batch_size=1, training__cuda_graphs="auto")
    print(small.graph_lines())
    assert small.graphed[-1] == 1.0, small.graph_lines()


def test_a_failed_capture_leaves_torch_as_it_was() -> None:
    """Allocation, the generator and the stream work afterwards, and another captured can be made."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")
    capturer = flat_capturer()
    stream = torch.cuda.current_stream()

    def waits_while_recorded(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def computed() -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing():
                float(torch.rand(4, device="cuda").sum())
            return compute()

        return computed

    def compute() -> torch.Tensor:
        return (torch.rand(64, device="cuda") * capturer._leaves[0]).sum()

    with pytest.raises(Exception):  # noqa: B017  torch's type of it differs between versions
        capturer.capture(waits_while_recorded(compute), must_be_faster=False)
    assert torch.cuda.current_stream() == stream
    torch.rand(4, device="cuda").sum().item()
    capturer = again = flat_capturer()
    torch.manual_seed(1)
    captured = again.capture(compute, must_be_faster=False)
    torch.manual_seed(1)
    first, second = captured(), captured()
    torch.manual_seed(1)
    wanted = [float((torch.rand(64, device="cuda") * again._leaves[0]).sum()) for _ in range(2)]
    assert [float(first), float(second)] == wanted


def flat_capturer() -> GraphCapturer:
    down, up = (torch.nn.Parameter(torch.randn(*shape, device="cuda")) for shape in ((4, 8), (8, 4)))
    pair = Member("a", torch.nn.Module(), down), Member("b", torch.nn.Module(), up)
    flat = FlatAdapter([pair], separate_up=False)
    return GraphCapturer(flat)
