"""Faults of libraries that are worked around: each test fails once the library is fixed, and its workaround may go.

What is not here cannot be seen on a CPU or in one process: DeepSpeed's waits for the device (overlap_comm, timers,
norms), its launcher's way to end (tests/cluster, tests/unit/test_launcher_run.py), copies of shared key heads in
torch 2.11's varlen_attn.
"""

import copy
import datetime
import gc
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine import one_rank

WEIGHT = torch.tensor([[0.5, -0.25]])
GRADIENT = torch.tensor([[0.25, -0.5]])


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


def raw_engine(stage: int, optimizer: Any = torch.optim.SGD, *, lr: float = 0.25, **config: Any) -> Any:
    """DeepSpeed's engine of 0.19.8 as it comes, around one weight in fp16 unless `config` says another format."""
    import deepspeed

    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.data = WEIGHT.clone()
    layer = layer.to(torch.bfloat16 if "bf16" in config else torch.float16)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    if "bf16" not in config:
        settings["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1}
    chosen = optimizer(layer.parameters(), lr=lr)
    engine, *_ = deepspeed.initialize(
        model=layer, optimizer=chosen, model_parameters=list(layer.parameters()), config=settings | config
    )
    return engine


def weight_of(engine: Any) -> torch.Tensor:
    return engine.module.weight.detach().float().cpu().clone()


def pass_back(engine: Any, gradient: torch.Tensor = GRADIENT) -> None:
    """Return a loss with the gradient `gradient`."""
    engine.backward(engine(gradient.to(engine.device, engine.module.weight.dtype)).float().sum())


def test_deepspeed_clips_if_nothing_is_said() -> None:
    """trainer/parallel/engine/deepspeed_engine.py says `gradient_clipping` even where nothing is clipped."""
    from deepspeed.runtime.config import get_gradient_clipping
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    assert get_gradient_clipping({}) == GRADIENT_CLIPPING_DEFAULT
    layer = torch.nn.Linear(2, 1, bias=False).half()
    import deepspeed

    settings = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}}
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(
        model=layer, optimizer=optimizer, model_parameters=list(layer.parameters()), config=settings
    )
    assert engine.gradient_clipping() == 1.0


def test_stage_0_takes_a_step_of_zeros() -> None:
    """deepspeed_workarounds.undo_zero_gradient_step."""

    def decaying(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.5)

    engine = raw_engine(0, decaying, bf16={"enabled": True})
    (master,) = engine.optimizer.fp32_groups[0]
    assert float(engine.basic_optimizer.state[master]["step"]) == 1
    torch.testing.assert_close(master.detach().cpu(), WEIGHT * (1 - 0.25 * 0.5))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_loss_scale_rises_before_gradients_are_divided_by_it(stage: int) -> None:
    """deepspeed_workarounds.delay_loss_scale."""
    engine = raw_engine(stage)
    changes = []
    for _ in range(4):
        before, scale = weight_of(engine), engine.optimizer.loss_scale
        pass_back(engine, GRADIENT * (scale if stage == 0 else 1))  # at stage 0 it does not multiply the loss
        engine.step()
        rises = engine.optimizer.loss_scale > scale
        share = float(((before - weight_of(engine)) / (0.25 * GRADIENT)).mean())
        changes.append((rises, round(share, 2)))
    assert (True, 0.5) in changes and (False, 1.0) in changes, changes


def test_stage_0_reports_the_norm_times_the_loss_scale() -> None:
    """The same; `scaled_norm`."""
    engine = raw_engine(0)
    pass_back(engine, GRADIENT * 256)
    engine.step()
    assert float(engine.get_global_grad_norm()) == pytest.approx(256 * float(GRADIENT.norm()), rel=1e-3)


def test_stage_0_divides_by_a_loss_scale_that_it_never_applied() -> None:
    """deepspeed_workarounds.scale_loss, which sees for itself whether it is needed."""
    engine = raw_engine(0)
    assert engine.optimizer.loss_scale == 256.0
    pass_back(engine)
    torch.testing.assert_close(engine.module.weight.grad.float().cpu(), GRADIENT)


def test_stage_0_knows_no_hysteresis() -> None:
    """With hysteresis 1, which deepspeed_engine.py sets, all stages lower the scale at the first overflow."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 2}
    scales = {}
    for stage in (0, 2):
        engine = raw_engine(stage, fp16=fp16)
        pass_back(engine, torch.tensor([[torch.inf, 0.0]]))
        engine.step()
        scales[stage] = engine.optimizer.loss_scale
    assert scales == {0: 128.0, 2: 256.0}


def test_deepspeeds_norm_hides_what_is_not_finite() -> None:
    """trainer/patches/deepspeed_workarounds.py measures it itself."""
    engine = raw_engine(2, bf16={"enabled": True, "check_grad_overflow": False})
    gradients = [torch.tensor([[torch.nan, 1.0]], device=engine.device)]
    assert float(engine.optimizer.get_grad_norm_direct(gradients, list(engine.module.parameters()))) == -1.0


def test_deepspeeds_own_groups_wait_as_long_as_torch_says() -> None:
    """set_process_group_timeouts: `timeout` of the first group, at its default in one_rank, is passed to none."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=77), dist.group.WORLD)
    engine = raw_engine(2)
    groups = [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    waits = [group._get_backend(engine.device).options._timeout for group in groups]
    assert waits and datetime.timedelta(minutes=77) not in waits, waits
    del engine


def test_deepspeed_compiles_what_training_does_not_call() -> None:
    """ranks.form_process_group: sums in shared memory are those of `inference_all_reduce`, of tensor parallelism."""
    import deepspeed

    root = Path(deepspeed.__file__).parent
    sources = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    assert "self.shm_comm_op = build_shm_op()" in sources["comm/torch.py"]
    assert {name for name, text in sources.items() if "build_shm_op" in text} == {"comm/torch.py"}
    callers = {name for name, text in sources.items() if "inference_all_reduce(" in text}
    assert callers - {"comm/torch.py", "comm/comm.py", "comm/backend.py", "comm/ccl.py"} == {"module_inject/layers.py"}


def test_deepspeed_registers_passes_of_its_compiler_unasked() -> None:
    """deepspeed_engine.start_engine: on GPUs, by a function that asks for the accelerator alone."""
    import deepspeed

    source = inspect.getsource(deepspeed.runtime.engine)
    assert source.count("is_deepcompile_supported()") == 1
    assert "if is_deepcompile_supported():\n            # Predefined compile passes" in source
    assert "from deepspeed.compile.backend import register_compile_pass" in source


def test_deepspeeds_builder_asks_for_fast_math() -> None:
    """ops/builder.py gives nvcc flags of its own."""
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    assert "--use_fast_math" in inspect.getsource(CUDAOpBuilder.nvcc_args)


def test_bitsandbytes_takes_wrong_scales_on_a_cpu() -> None:
    """quantize.dequantized: rows of 64 in blocks of 128, by the kernel for AVX-512."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 32)[:, None]
    packed, state = quantize_4bit(weight, blocksize=128, quant_type="nf4")
    wrong = float((dequantize_4bit(packed, state) - weight).norm() / weight.norm()) > 0.3  # NF4 rounds by about 0.1
    assert wrong == (torch.backends.cpu.get_cpu_capability() == "AVX512")
    whole, state = quantize_4bit(weight.view(16, 128), blocksize=128, quant_type="nf4")
    assert float((dequantize_4bit(whole, state).view(32, 64) - weight).norm() / weight.norm()) < 0.15


def test_bitsandbytes_makes_a_new_parameter_where_nothing_moves() -> None:
    """quantize.Params4bit.to."""
    import bitsandbytes as bnb

    weight = bnb.nn.Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4").to("cpu")
    assert weight.to("cpu") is not weight


def test_bitsandbytes_keeps_the_packed_weight_until_the_backward_pass() -> None:
    """quantize.FrozenLinear4bit: a view, of which stage 3 cannot take the memory away."""
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
    y = layer(torch.randn(2, 64, requires_grad=True))
    kept = [tensor for tensor in (getattr(y.grad_fn, "tensors", None) or ()) if tensor is not None]
    assert any(tensor is not layer.weight and tensor.dtype == torch.uint8 for tensor in kept)


def test_transformers_leaves_shared_heads_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """attention.register_repeated_heads_attention: without flash attention torch would keep L x L probabilities."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    asked: list[dict[str, Any]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def note(query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
        asked.append({"heads": key.shape[1], **options})
        return real(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True  # type: ignore[assignment]
    query, shared = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    sdpa_attention_forward(module, query, shared, shared, None)
    assert asked[0]["heads"] == 2 and asked[0]["enable_gqa"]


def test_transformers_does_not_save_legacy(tmp_path: Path) -> None:
    """model.load_tokenizer notes it among what is saved."""
    from transformers import AutoTokenizer

    from tests.tiny import make_tokenizer

    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.legacy = False
    tokenizer.save_pretrained(tmp_path / "again")
    assert not hasattr(AutoTokenizer.from_pretrained(tmp_path / "again"), "legacy")


def test_torchs_build_lock_outlives_its_builder(tmp_path: Path) -> None:
    """ops/prebuilt.py builds in new folders, and launcher/supervision/build_locks.py removes it."""
    from torch.utils.file_baton import FileBaton

    assert FileBaton(str(tmp_path / "lock")).try_acquire()
    gc.collect()
    assert not FileBaton(str(tmp_path / "lock")).try_acquire()


def test_datasets_puts_another_object_in_the_place_of_the_environment(tmp_path: Path) -> None:
    """data/documents.py puts the real one back."""
    from datasets import Dataset

    real = os.environ
    try:
        Dataset.from_dict({"x": list(range(4))}).map(_same, num_proc=2, cache_file_name=str(tmp_path / "mapped.arrow"))
        assert os.environ is not real
    finally:
        os.environ = real  # noqa: B003


IMPORTED = """
import torch
calls, at = [], []
torch.compile = lambda function=None, **options: calls.append(at[-1]) or function or (lambda one: one)
for name in ("bitsandbytes", "deepspeed.runtime.zero.muon.original_muon"):
    at.append(name)
    __import__(name)
print("called by", *dict.fromkeys(calls))
"""


def test_bitsandbytes_and_deepspeed_compile_while_they_are_imported() -> None:
    """Else trainer/parallel/ranks/lean_imports.py can go."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert "called by bitsandbytes deepspeed.runtime.zero.muon.original_muon" in done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers.quantizers.auto", "peft.tuners.lora.torchao", "diffusers"])
def test_transformers_imports_torchao_unasked(name: str) -> None:
    """Else that part of trainer/parallel/ranks/lean_imports.py can go. PEFT asks at the first layer that it adapts."""
    pytest.importorskip("torchao", reason="needs torchao: pip install torchao compressed-tensors")
    ask = {
        "peft.tuners.lora.torchao": "import torch, peft.tuners.lora.torchao as one; "
        "one.dispatch_torchao(torch.nn.Linear(1, 1), 'x', None)",
        "diffusers": "import diffusers; diffusers.AutoencoderKL",
    }
    program = f"import sys; {ask.get(name, 'import ' + name)}; print('torchao' in sys.modules)"
    for lean, imported in (
        ("", "True"),
        ("from trainer.parallel.ranks.lean_imports import hook_imports; hook_imports(); ", "False"),
    ):
        done = subprocess.run([sys.executable, "-c", lean + program], capture_output=True, text=True, check=True)
        assert done.stdout.split()[-1] == imported, lean


@pytest.mark.slow
def test_transformers_imports_scipy_for_what_no_run_calls(tmp_path: Path) -> None:
    """Else its line in trainer/parallel/ranks/lean_imports.py can go."""
    (tmp_path / "scipy").mkdir()
    (tmp_path / "scipy" / "__init__.py").write_text("print('imported'); raise SystemExit")
    information = tmp_path / "scipy-99.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: scipy\nVersion: 99.0\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for before, shown in (
        ("", "imported"),
        ("from trainer.parallel.ranks.lean_imports import hook_imports; hook_imports(); ", "not imported"),
    ):
        program = f"{before}import transformers.loss.loss_utils; print('not imported')"
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.stdout.split("\n")[-2] == shown


def _same(record: dict[str, Any]) -> dict[str, Any]:
    return copy.copy(record)


def _experts(model_type: str) -> Any:
    from tests.distributed.test_families import FAMILIES
    from tests.unit.test_targets import model_of

    return model_of(model_type, num_hidden_layers=2, **FAMILIES[model_type])


def test_peft_refuses_dropout_on_experts() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"], lora_dropout=0.1)
    with pytest.raises(ValueError, match="dropout"):
        get_peft_model(_experts("mixtral"), config)


def test_peft_takes_dense_layers_for_experts() -> None:
    """peft#3711: the first layer of this DeepSeek-V3 is dense."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(_experts("deepseek_v3"), LoraConfig(target_modules="all-linear"))
    layers = model.get_base_model().model.layers
    assert type(layers[0].mlp.gate_proj) is torch.nn.Linear, "without adapter, though all were asked for"
