"""Libraries on internals of which we rely: what is said of them, and that every reliance fails loudly."""

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launcher.doctor.this_host import check_packages
from trainer.config import UserError
from trainer.contract import known_versions
from trainer.contract.known_versions import TESTED_VERSIONS, build_version_warning, describe_untested, require
from trainer.model.expert_layers import has_fused_experts
from trainer.parallel.engine.partitioned import require_broadcast_exclusion, require_partitioned
from trainer.patches.loss_head import bypass_adapter
from trainer.patches.mamba import LAYER_KERNEL, has_scan_kernels, install_mamba_projections

ROOT = Path(__file__).parents[2]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def pretend(monkeypatch: pytest.MonkeyPatch, **wanted: str) -> None:
    real = metadata.version
    monkeypatch.setattr(known_versions, "version", lambda name: wanted.get(name.replace("-", "_")) or real(name))


def test_the_pinned_versions_are_the_newest_tested_ones() -> None:
    assert {library: tested[-1] for library, tested in TESTED_VERSIONS.items()} == {
        library: pinned()[library] for library in TESTED_VERSIONS
    }


def test_a_tested_version_is_passed_over_whatever_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch="2.11.0+cu130", transformers="5.17.0", **_others("torch", "transformers"))
    assert build_version_warning() is None


def test_other_versions_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, transformers="5.24.0", peft="0.21.3", **_others("transformers", "peft"))
    line = build_version_warning()
    assert line is not None and "\n" not in line
    assert line == (
        "not tested with transformers 5.24.0 (tested: 5.17.0, 5.23.0); peft 0.21.3 (tested: 0.21.2); "
        "install the versions in constraints.txt"
    )
    reported = [check for check in check_packages() if check.name == "known versions"]
    assert [check.state for check in reported] == ["WARN", "WARN"]
    assert [
        check.found for check in reported
    ] == describe_untested() and "version of peft in constraints.txt" in reported[1].fix


def _others(*but: str) -> dict[str, str]:
    return {name.replace("-", "_"): tested[-1] for name, tested in TESTED_VERSIONS.items() if name not in but}


@pytest.mark.parametrize(("version", "fix"), [("0.1.0", r"install deepspeed==\S+, the tested"), (None, "report this")])
def test_a_missing_private_name_is_one_line_with_library_and_version(
    version: str | None, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that is installed is never the one to install."""
    tested = TESTED_VERSIONS["deepspeed"][-1]
    pretend(monkeypatch, deepspeed=version or tested)
    expected = f"deepspeed {version or tested}: SimpleNamespace has no `_norm`, but zerolora needs it; "
    with pytest.raises(UserError, match=re.escape(expected) + fix):
        require(SimpleNamespace(), "_norm", "deepspeed")
    assert require(SimpleNamespace(_norm=None), "_norm", "deepspeed") is None


def test_only_one_file_spells_what_deepspeed_adds_to_a_parameter() -> None:
    folders = ("trainer", "ops", "launcher", "benchmarks", "examples")
    ours = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    # `ds_type` is a key of Axolotl's files
    spelled = re.compile(r"\bds_(?!(accelerator|type)\b)[a-z_]+", re.IGNORECASE)
    found = {str(path.relative_to(ROOT)) for path in ours if spelled.search(_code(path))}
    assert found == {"trainer/parallel/engine/partitioned.py"}


def _code(path: Path) -> str:
    without_variables = re.sub(r"\bDS_[A-Z_]+\b|zero_force_ds_cpu_optimizer", "", path.read_text())
    return "\n".join(line for line in without_variables.splitlines() if "argparse" not in line)


def test_stage_3_that_marks_parameters_otherwise_is_refused() -> None:
    with pytest.raises(UserError, match=r"stage 3 leaves trained parameters without `ds_id`"):
        require_partitioned([torch.nn.Parameter(torch.ones(2))])


def test_a_broadcast_that_passes_over_no_mark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed import DeepSpeedEngine

    require_broadcast_exclusion()

    def broadcast(self: Any) -> None:
        """Of everything."""

    monkeypatch.setattr(DeepSpeedEngine, "_broadcast_model", broadcast)
    with pytest.raises(UserError, match="does not skip weights marked"):
        require_broadcast_exclusion()


def test_torch_has_the_flight_recorder_and_the_attention_kernel() -> None:
    """Neither is run on a CPU: without the one reports would lose the collective's name, the other is positional."""
    import torch._C._distributed_c10d as distributed

    assert any(hasattr(distributed, name) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
    names = [argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert names[:9] == ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    assert names[9] == "return_debug_mask" and {"scale", "window_size_left", "window_size_right"} <= set(names)


def test_adapters_that_peft_would_switch_off_by_another_name_are_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The divergence from the base would else be one from the adapted model: 0 at every step."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    layer: Any = next(part for part in model.modules() if isinstance(part, Linear))
    with bypass_adapter(model):
        assert layer.disable_adapters
    assert not layer.disable_adapters
    monkeypatch.delattr(BaseTunerLayer, "_disable_adapters")
    del layer._disable_adapters
    with pytest.raises(UserError, match=r"^peft .*: Linear has no `_disable_adapters`"), bypass_adapter(model):
        pass


class Experts(torch.nn.Module):
    """As transformers keeps them."""

    def __init__(self, **more: torch.nn.Parameter | torch.nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.ones(2, 4, 4))
        self.down_proj = torch.nn.Parameter(torch.ones(2, 4, 4))
        self.down_proj_bias, self.act_fn = torch.nn.Parameter(torch.ones(2, 4)), torch.nn.SiLU()
        self._apply_gate = torch.nn.functional.silu
        for name, part in more.items():
            setattr(self, name, part)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        """Take what transformers gives to experts."""


def test_experts_that_compute_with_more_than_is_known_get_no_adapter() -> None:
    assert has_fused_experts(Experts())
    normed = Experts(post_expert_norm=torch.nn.LayerNorm(4))
    normed.has_post_expert_norm = True  # type: ignore[assignment]
    assert has_fused_experts(normed)
    for more in (
        {"post_expert_norm": torch.nn.LayerNorm(4)},
        {"pre_norm": torch.nn.LayerNorm(4)},
        {"down_bias": torch.nn.Parameter(torch.ones(2, 4))},
    ):
        assert not has_fused_experts(Experts(**more))
    without_gate = Experts()
    del without_gate._apply_gate
    assert not has_fused_experts(without_gate), "as those of LongCat-Flash, some of which pass their input on"


def test_a_mamba_layer_whose_kernel_has_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel would take out_proj's weight and pass the adapter by."""
    from transformers import Mamba2Config, Mamba2Model
    from transformers.models.mamba2 import modeling_mamba2 as modeling

    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "state_size": 8}
    model = Mamba2Model(Mamba2Config(num_hidden_layers=1, vocab_size=16, **sizes))
    assert install_mamba_projections(model)
    monkeypatch.delattr(modeling, LAYER_KERNEL)
    with pytest.raises(UserError, match=f"^transformers .*: .* has no `{LAYER_KERNEL}`"):
        install_mamba_projections(model)


def test_scan_kernels_that_are_installed_and_cannot_be_imported_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers goes without them and says nothing; memory and time are those of plain torch."""
    from transformers import Mamba2Config, Mamba2Model

    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "state_size": 8}
    model = Mamba2Model(Mamba2Config(num_hidden_layers=1, vocab_size=16, **sizes))

    def reported(**modules: str) -> list[str]:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return install_mamba_projections(model)

    broken = "raise ImportError('undefined symbol: a, in another size')"
    try:
        assert "install the `mamba` extra for faster kernels" in reported(mamba_ssm="")[0] and not has_scan_kernels()
        (line,) = reported(selective_scan_cuda=broken)
        assert "in plain torch; mamba_ssm is installed but cannot be imported (undefined symbol: a" in line
        assert not has_scan_kernels()
        (line,) = reported(selective_scan_cuda="", mamba_ssm=broken)
        assert "in plain torch; mamba_ssm is installed but cannot be imported (undefined symbol: a" in line
        scan, convolution = reported(mamba_ssm="# in order")
        assert has_scan_kernels() and "outside mamba-ssm's kernel" in scan
        assert "convolutions run in plain torch; install the `mamba` extra for" in convolution
    finally:
        for name in ("mamba_ssm", "selective_scan_cuda"):
            sys.modules.pop(name, None)


def test_packed_latents_that_diffusers_unpacks_by_another_name_are_refused() -> None:
    from trainer.tasks.images.task import _decode

    drawn = SimpleNamespace(vae=None, vae_scale_factor=8)
    with pytest.raises(UserError, match=r"^diffusers .* has no `_unpack_latents`"):
        _decode(drawn, torch.zeros(1, 16, 64), 64)
