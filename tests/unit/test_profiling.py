"""The profiler names the parts of a step."""

from pathlib import Path
from types import SimpleNamespace

from trainer.monitor.profiler import StepProfiler


def test_a_method_that_was_replaced_before_is_called(tmp_path: Path) -> None:
    """As engine.backward is under fp16 at stage 0, where it multiplies the loss by its scale."""
    calls: list[str] = []

    def replacement(loss: float) -> None:
        calls.append(f"backward {loss}")

    engine = SimpleNamespace(backward=replacement, step=lambda: calls.append("step"))
    profiler = StepProfiler(tmp_path, 0, 1, engine, None)
    profiler.before_step(1)
    assert engine.backward is not replacement
    engine.backward(2.0)
    engine.step()
    profiler.finish()
    assert calls == ["backward 2.0", "step"]
    assert (tmp_path / "profile" / "rank-0.json.gz").exists()
