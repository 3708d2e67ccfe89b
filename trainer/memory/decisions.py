"""Decide on kernels, kept tensors and memory layout before any weights are loaded.

Decisions follow from the configuration, the machine and the model on the meta device. The builder executes them, the
memory estimate uses them, and they are shown on the console and in run.json. If a self-test or probe on the device
contradicts a decision, the builder reports it, because the estimate is then wrong.
"""

from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from trainer.config import AUTO, RunConfig
from trainer.config.checks import TILES_NO_GRAPHS, find_feature_problem
from trainer.config.zero import describe_layer_gather_problem, gathers_per_layer, resolve_engine_zero
from trainer.parallel.engine.deepspeed_engine import can_guard_on_device
from trainer.parallel.engine.flat_adapter import describe_flat_problem
from trainer.parallel.ranks.group import list_shard_groups
from trainer.patches.mamba import has_scan_kernels
from trainer.patches.model_properties import ModelProperties
from trainer.patches.norm_mlp_rope import PARTS
from trainer.patches.tiled_mlp import AUTO_TILE

KernelChoice = Literal["ours", "model"]
VARLEN = "varlen"
MIN_TILED_TOKENS = 4 * AUTO_TILE
"""Minimum tokens per micro-step at which `training.tiled_mlp: auto` uses tiles."""
T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """Hosts, devices and kernels available to the ranks, and the precision (bf16, fp16 or fp32)."""

    world_size: int
    on_gpu: bool
    precision: str
    own_kernels: bool
    """Whether the CUDA operators are or will be built."""
    flash: bool
    """Whether torch's flash attention runs on the device in this precision."""
    scan_kernels: bool = False
    """Whether mamba-ssm's scan kernels are installed."""
    hosts: tuple[str, ...] = ()
    """Host of each rank; empty if all ranks are on one host."""
    host_memory: int | None = None
    """Bytes of host memory for a rank's offloaded tensors; None: unlimited."""

    @classmethod
    def assume_gpus(cls, world_size: int, precision: str, ranks_per_host: int | None = None) -> "Machine":
        """Return a machine with GPUs and all kernels, except those of mamba-ssm if it is not installed here."""
        hosts = tuple(f"host {rank // (ranks_per_host or world_size)}" for rank in range(world_size))
        return cls(world_size, True, precision, True, precision != "fp32", has_scan_kernels(), hosts)


@dataclass(frozen=True)
class Decision(Generic[T]):
    """A decision and its reason, which is empty for the default choice."""

    value: T
    reason: str = ""

    def __str__(self) -> str:
        words = {True: "yes", False: "no", None: "decided in the first step"}
        value = words.get(self.value, self.value)  # type: ignore[call-overload]
        return f"{value} ({self.reason})" if self.reason else str(value)


@dataclass(frozen=True)
class Decisions:
    attention: Decision[str]
    """`varlen`, `sdpa`, `eager`, or the value of model.attn_implementation."""
    own_elementwise: Decision[bool]
    """Whether to try our kernels for norms, SwiGLU and rotary embedding."""
    norms: Decision[KernelChoice]
    swiglu: Decision[KernelChoice]
    rotary: Decision[KernelChoice]
    adapters: Decision[str]
    """Implementation of adapted layers: `cuda`, `reference`, `peft`, `rounded` (training.qat), or `none`."""
    siblings: Decision[bool]
    """Whether shared-input projections are computed in one call."""
    recomputed_results: Decision[str]
    """Results that the backward pass recomputes: `none`, `activations` (of SwiGLU), or `norms` (both)."""
    attention_again: Decision[bool]
    """Whether recomputed layers also recompute attention."""
    mlp_tile: Decision[int]
    """Tokens per tile of gated MLPs; 0: no tiles."""
    fused_head: Decision[bool | None]
    """Whether head and loss are fused and computed in chunks; None: decided in the first micro-batch."""
    gather: Decision[str]
    """How stage 3 gathers the base model: per `layer`, per `module`, or `none`."""
    shard_group: Decision[int]
    """Number of ranks that share one copy of the base model at stage 3, in the smallest group."""
    flat: Decision[bool]
    """Whether all LoRA factors are in one buffer."""
    clips_on_device: Decision[bool]
    """Whether the optimizer clips gradients and skips steps on the device, without synchronizing with the host."""
    cuda_graphs: Decision[bool | None]
    """Whether micro-steps are replayed from CUDA graphs; None: decided in the first steps."""

    def to_json(self) -> dict[str, dict[str, object]]:
        return {name: {"value": choice.value, "reason": choice.reason} for name, choice in vars(self).items()}

    def format_summary(self) -> str:
        """Return a line with the decisions that are not shown elsewhere on the console."""
        shown = {
            "attention": self.attention,
            "attention recomputed": self.attention_again,
            "loss fused with the head": self.fused_head,
            "adapter in one buffer": self.flat,
            "clipping on the device": self.clips_on_device,
            "CUDA graphs": self.cuda_graphs,
        }
        return "decided: " + ", ".join(f"{name}: {decision}" for name, decision in shown.items())


def decide(config: RunConfig, machine: Machine, model: ModelProperties | None) -> Decisions:
    """Return the decisions for a configuration with zero.stage resolved. `model` is None if it could not be built."""
    own_elementwise = _choose_elementwise(config, machine)
    norms, swiglu, rotary = (_choose_kernels(part, model, own_elementwise) for part in PARTS)
    zero = resolve_engine_zero(config)
    not_flat = describe_flat_problem(config)
    return Decisions(
        attention=_choose_attention(config, machine, model),
        own_elementwise=own_elementwise,
        norms=norms,
        swiglu=swiglu,
        rotary=rotary,
        adapters=_choose_adapters(config, machine),
        siblings=_choose_shared_input_fusion(config, machine),
        recomputed_results=_choose_recomputed_results(config, machine),
        attention_again=_choose_attention_recomputation(config),
        mlp_tile=_choose_mlp_tile(config),
        fused_head=_choose_fused_head(config, machine, model),
        gather=_choose_gather(config),
        shard_group=_choose_shard_group(config, machine),
        flat=Decision(not_flat is None, not_flat or ""),
        clips_on_device=Decision(can_guard_on_device(config.training, zero, machine.precision, machine.on_gpu)),
        cuda_graphs=_choose_cuda_graphs(config, machine),
    )


def decide_for_images(config: RunConfig, machine: Machine, model: ModelProperties | None) -> Decisions:
    """Return the decisions for an image model: adapters and ZeRO as for text, everything else as in diffusers."""
    model_code = Decision[KernelChoice]("model", "an image model")
    return replace(
        decide(config, machine, None),
        attention=Decision("sdpa"),
        own_elementwise=Decision(False, "an image model"),
        norms=model_code,
        swiglu=model_code,
        rotary=model_code,
        recomputed_results=Decision("none", "an image model"),
        mlp_tile=Decision(0, "an image model"),
        fused_head=Decision(False, "image models have no output head"),
        cuda_graphs=Decision(False, "an image model"),
    )


def _choose_attention(config: RunConfig, machine: Machine, model: ModelProperties | None) -> Decision[str]:
    """Choose the attention implementation: the configured one, `varlen`, `sdpa` or `eager`.

    Unless configured, packed sequences use variable-length kernels if the device and the model support them,
    and sequences split across ranks always do.
    """
    requested = config.model.attn_implementation
    if requested != "auto":
        return Decision(requested, "as configured")
    if config.parallel.sequence > 1:
        return Decision(VARLEN, f"parallel.sequence: {config.parallel.sequence} ranks exchange attention heads")
    if model is not None and model.sinks and model.registry and config.dataset.packing:
        return Decision(VARLEN, "" if machine.flash else "attention sinks are computed per document in plain torch")
    if model is not None and not model.sdpa:
        return Decision("eager", "the model supports no other attention")
    if not config.dataset.packing:
        return Decision("sdpa")
    if not machine.flash:
        return Decision("sdpa", "without flash attention, packed documents need a mask")
    if model is not None and not model.registry:
        return Decision("sdpa", "packed documents need a mask, because the model's attention cannot be replaced")
    return Decision(VARLEN)


def _choose_elementwise(config: RunConfig, machine: Machine) -> Decision[bool]:
    if config.ops.elementwise == "off":
        return Decision(False, "ops.elementwise: off")
    if not machine.on_gpu:
        return Decision(False, "no GPU")
    if config.training.torch_compile:
        return Decision(False, "torch.compile fuses these operators")
    if config.ops.backend not in ("auto", "cuda"):
        return Decision(False, f"ops.backend: {config.ops.backend}")
    return Decision(machine.own_kernels, "" if machine.own_kernels else "the CUDA kernels are not built")


def _choose_kernels(part: str, model: ModelProperties | None, elementwise: Decision[bool]) -> Decision[KernelChoice]:
    refusal = elementwise.reason if not elementwise.value or model is None else model.elementwise[part]
    return Decision("model", refusal) if refusal or not elementwise.value else Decision("ours")


def _choose_adapters(config: RunConfig, machine: Machine) -> Decision[str]:
    backend = config.ops.backend
    if config.adapter == "none":
        return Decision("none", "all weights are trained")
    if config.training.qat:
        return Decision("rounded", f"training.qat: {config.training.qat}")
    if backend == "peft":
        return Decision("peft", "as configured")
    if backend == "auto" and not machine.on_gpu:
        return Decision("peft", "ops.backend: auto on a CPU")
    if backend == "reference" or (backend == "auto" and not machine.own_kernels):
        return Decision("reference", "as configured" if backend == "reference" else "the CUDA kernels are not built")
    return Decision("cuda")


def _choose_shared_input_fusion(config: RunConfig, machine: Machine) -> Decision[bool]:
    if _choose_adapters(config, machine).value in ("none", "peft"):
        return Decision(False)
    if config.training.qat:
        return Decision(False, "training.qat: each projection has a separate merged weight")
    if config.zero.stage == 3 and not gathers_per_layer(config):
        return Decision(False, "zero.gather: module gathers each adapted layer separately")
    if config.training.torch_compile:
        return Decision(False, "torch.compile traces each layer separately")
    return Decision(True)


def _choose_recomputed_results(config: RunConfig, machine: Machine) -> Decision[str]:
    # Gradient checkpointing keeps none of these, and DeepSpeed's stage 3 frees norm weights before the backward pass.
    if config.ops.recompute == "none" or config.adapter == "none":
        return Decision("none", "ops.recompute: none" if config.adapter != "none" else "all weights are trained")
    training = config.training
    if training.gradient_checkpointing != "none" and training.gradient_checkpointing_layers is None:
        return Decision("none", "training.gradient_checkpointing")
    if resolve_engine_zero(config).stage == 3:
        return Decision("none", "zero.gather: module")
    if not _choose_elementwise(config, machine).value:
        return Decision("none", "the model's kernels are used")
    return Decision(config.ops.recompute)


def _choose_attention_recomputation(config: RunConfig) -> Decision[bool]:
    training = config.training
    if training.gradient_checkpointing != "non_reentrant":
        return Decision(False, f"training.gradient_checkpointing: {training.gradient_checkpointing}")
    if not training.recompute_attention:
        where = "in host memory" if training.offload_activations else "on the device"
        return Decision(False, f"attention's output and log-sum-exp are kept {where}")
    return Decision(True)


def _choose_mlp_tile(config: RunConfig) -> Decision[int]:
    requested = config.training.tiled_mlp
    if not requested:
        return Decision(0, "training.tiled_mlp: false")
    if requested != "auto":
        return Decision(AUTO_TILE if requested is True else requested)
    rows = 1 if config.training.batch_size == AUTO else config.training.batch_size
    if rows * config.dataset.max_length // config.parallel.sequence < MIN_TILED_TOKENS:
        return Decision(0, f"fewer than {MIN_TILED_TOKENS:,} tokens per micro-step")
    problem = find_feature_problem("tiles", config)
    return Decision(0, problem[1]) if problem else Decision(AUTO_TILE)


def _choose_fused_head(config: RunConfig, machine: Machine, model: ModelProperties | None) -> Decision[bool | None]:
    if model is not None and model.head:
        return Decision(False, model.head)
    if config.adapter == "none":
        return Decision(False, "the head is trained")
    if resolve_engine_zero(config).stage == 3:
        return Decision(False, "DeepSpeed's stage 3 partitions the head")
    return Decision(True if model is not None and model.head is not None else None)


def _choose_cuda_graphs(config: RunConfig, machine: Machine) -> Decision[bool | None]:
    requested = config.training.cuda_graphs
    if requested == "off":
        return Decision(False, "training.cuda_graphs: off")
    if not machine.on_gpu:
        return Decision(False, "no GPU")
    if problem := find_feature_problem("graphs", config):
        return Decision(False, problem[1])
    if _choose_mlp_tile(config).value:
        return Decision(False, TILES_NO_GRAPHS)
    return Decision(True, "as configured") if requested == "on" else Decision(None)


def _choose_shard_group(config: RunConfig, machine: Machine) -> Decision[int]:
    if config.zero.stage < 3 or not gathers_per_layer(config):
        return Decision(machine.world_size)
    within = config.zero.shard_within
    groups = list_shard_groups(within, machine.hosts or ("",) * machine.world_size)
    size = min(map(len, groups))
    return Decision(size) if len(groups) == 1 else Decision(size, f"zero.shard_within: {within}")


def _choose_gather(config: RunConfig) -> Decision[str]:
    if config.zero.stage < 3:
        return Decision("none")
    if gathers_per_layer(config):
        return Decision("layer")
    return Decision("module", describe_layer_gather_problem(config) or "as configured")
