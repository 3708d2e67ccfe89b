"""Read an adapter's factors for each layer and expert, keyed by the layer names in the base's checkpoint.

    model.layers.0.self_attn.q_proj             A [R, in], B [out, R], the scale of B A
    model.layers.0.mlp.experts.7.gate_proj      one pair for each part of each expert; gate and up share A

Experts have the checkpoint's names (`block_sparse_moe.experts.7.w1`) if it stores them one by one, otherwise gate_proj,
up_proj and down_proj. PEFT stores the A matrices of all E experts as one [E R, in] matrix, and B as [out, R E].
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.config import UserError
from trainer.contract.known_versions import require
from trainer.model.base import build_empty_model, load_model_config
from trainer.model.expert_forward import detect_activation
from trainer.model.expert_layers import (
    DOWN,
    GATE_UP,
    UP,
    find_expert_modules,
    get_expert_shape,
    is_transposed,
    list_expert_tensors,
    takes_all_tokens,
)
from trainer.model.older_names import map_saved_names
from trainer.model.saved_adapter import check_separate_weights, load_adapter
from trainer.model.targets import find_non_text_modules

PARTS = {GATE_UP: ("gate_proj", "up_proj"), UP: ("up_proj",), DOWN: ("down_proj",)}
STORED_AS = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3", "w1"), "down_proj": ("down_proj", "w2")}
PEFT_PREFIX = "base_model.model."
FUSED_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that servers fuse into one; their adapters must have the same shape."""


@dataclass(frozen=True)
class Factors:
    """The update to a layer's weight: `scale` B A."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float

    def pad_rank(self, rank: int) -> "Factors":
        more = rank - len(self.a_RI)
        a_RI, b_OR = (torch.nn.functional.pad(value, pad) for value, pad in
                      ((self.a_RI, (0, 0, 0, more)), (self.b_OR, (0, more))))  # fmt: skip
        return Factors(a_RI, b_OR, self.scale)

    def rescale(self, scale: float) -> "Factors":
        """Return the same update with another scale, by rescaling B."""
        return Factors(self.a_RI, self.b_OR * (self.scale / scale), scale) if scale != self.scale else self


def read_factors(folder: Path, base_model: str, section: Any, *, complete_groups: bool) -> dict[str, Factors]:
    """Read the factors of the adapter in `folder`, keyed by the layer names in the base's checkpoint.

    Unadapted parts of partly adapted experts get zero factors, since servers need all parts or none. With
    `complete_groups`, the unadapted layers of a partly adapted group (q, k, v or gate, up) get them too. Raises
    UserError for anything but low-rank factors, and for adapters on vision towers.
    """
    config = load_model_config(base_model, section)
    model = build_empty_model(config, section)
    factors = _read_by_path(folder, build_empty_model(config, section), model)
    towers = tuple(f"{path}." for path in find_non_text_modules(model))
    if any(path.startswith(towers) for path in factors):
        fix = "export the merged model with --format hf"
        raise UserError(f"vision.train=lora: servers apply adapters only to the language model; {fix}")
    factors |= _build_missing_parts(factors, model)
    if complete_groups:
        factors |= _build_missing_layers(factors, model)
    names = _CheckpointNames(model)
    return {names.find(path): pair for path, pair in factors.items()}


def _read_by_path(folder: Path, adapted: Any, model: Any) -> dict[str, Factors]:
    """Return the factors by layer path in the model. The adapter is loaded into `adapted`, a copy of the model.

    The file may use the model's names or the checkpoint's. Raises UserError if tensors do not fit the model.
    """
    from peft import get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer

    with torch.device("meta"):
        prefix = f"base_model={model.config.name_or_path}: does not match the adapter"
        adapted = load_adapter(adapted, str(folder), error_prefix=prefix)
    check_separate_weights(adapted, "export")
    tensors = load_file(folder / "adapter_model.safetensors")
    stored_names = map_saved_names(adapted, get_peft_model_state_dict(adapted, save_embedding_layers=False))
    tensors = {name: tensors[stored if stored in tensors else name] for name, stored in stored_names.items()}
    experts = find_expert_modules(model)
    factors: dict[str, Factors] = {}
    for path, layer in adapted.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            a, b = (tensors[f"{PEFT_PREFIX}{path}.lora_{factor}.weight"] for factor in "AB")
            scale, experts_path = float(layer.scaling[layer.active_adapters[0]]), path.replace(".base_layer", "")
            if experts_path in experts:
                pairs = _split_experts(experts_path, experts[experts_path], layer.parameter_name, a, b)
                factors |= {part: Factors(*pair, scale) for part, pair in pairs.items()}
            else:
                factors[path] = Factors(a, b, scale)
    return factors


def _build_missing_parts(factors: dict[str, Factors], model: Any) -> dict[str, Factors]:
    """Return zero factors for the unadapted parts of partly adapted experts."""
    zeros: dict[str, Factors] = {}
    for experts_path, module in find_expert_modules(model).items():
        like = next((pair for path, pair in factors.items() if path.startswith(f"{experts_path}.")), None)
        if like is None:
            continue
        for name in list_expert_tensors(module):
            experts, *shape = get_expert_shape(module, name)
            inputs, outputs = shape if is_transposed(module) else reversed(shape)
            for part in PARTS[name]:
                paths = [f"{experts_path}.{index}.{part}" for index in range(experts)]
                missing = [path for path in paths if path not in factors]
                zeros |= {path: _build_zeros(like, inputs, outputs // len(PARTS[name])) for path in missing}
    return zeros


def _build_missing_layers(factors: dict[str, Factors], model: Any) -> dict[str, Factors]:
    """Return zero factors for unadapted layers that servers fuse with adapted ones."""
    weights = dict(model.named_parameters())
    zeros: dict[str, Factors] = {}
    for path, like in factors.items():
        parent, _, adapted = path.rpartition(".")
        for name in next((group for group in FUSED_LAYERS if adapted in group), ()):
            other = f"{parent}.{name}"
            weight = weights.get(f"{other}.weight")
            if other not in factors and weight is not None:
                zeros[other] = _build_zeros(like, weight.shape[1], weight.shape[0])
    return zeros


def _build_zeros(like: Factors, inputs: int, outputs: int) -> Factors:
    rank = len(like.a_RI)
    return Factors(like.a_RI.new_zeros(rank, inputs), like.b_OR.new_zeros(outputs, rank), like.scale)


def _split_experts(path: str, module: Any, name: str, a: Tensor, b: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    experts = get_expert_shape(module, name)[0]
    a_ERI = a.unflatten(0, (experts, -1))
    b_EOR = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if takes_all_tokens(module):  # here PEFT's A belongs to the outputs
        a_ERI, b_EOR = b_EOR.mT, a_ERI.mT
    gate = detect_activation(module)
    rows = [b_EOR]
    if len(PARTS[name]) == 2:
        interleaved = gate is not None and gate.interleaved
        rows = [b_EOR[:, 0::2], b_EOR[:, 1::2]] if interleaved else list(b_EOR.chunk(2, dim=1))
    return {
        f"{path}.{index}.{part}": (a_ERI[index], b_OR[index])
        for part, b_OR in zip(PARTS[name], rows, strict=True)
        for index in range(experts)
    }


class _CheckpointNames:
    """Finds the names of the model's layers in the base's checkpoint, using transformers' weight conversion."""

    def __init__(self, model: Any) -> None:
        from transformers import core_model_loading

        self._model = model
        self._revert = require(core_model_loading, "revert_weight_conversion", "transformers")
        weights = {name: torch.empty(weight.shape, device="meta") for name, weight in model.named_parameters()}
        self._shapes = {name: weight.shape for name, weight in self._revert(model, weights).items()}
        self._experts = set(find_expert_modules(model))
        self._expert_names: dict[str, dict[tuple[int, str], str]] = {}

    def find(self, path: str) -> str:
        """Return the stored name, without `.weight`, of a layer or expert part."""
        expert = re.fullmatch(r"(.*)\.(\d+)\.(gate_proj|up_proj|down_proj)", path)
        if expert is not None and expert[1] in self._experts:
            return self._find_expert(expert[1], int(expert[2]), expert[3])
        weight, stored = self._find_stored_tensors(f"{path}.weight")
        if [self._shapes.get(name) for name in stored] != [weight.shape]:
            raise _build_error(f"{path}: this checkpoint stores it as {', '.join(stored)}")
        return next(iter(stored)).removesuffix(".weight")

    def _find_expert(self, experts_path: str, index: int, part: str) -> str:
        if experts_path not in self._expert_names:
            names: dict[tuple[int, str], str] = {}
            module = self._model.get_submodule(experts_path)
            for name in list_expert_tensors(module):
                for stored in self._find_stored_tensors(f"{experts_path}.{name}")[1]:
                    match = re.search(r"\.(\d+)\.(\w+)\.weight$", stored)
                    is_known = match or stored.removesuffix(".weight").endswith((*PARTS, *STORED_AS))
                    if ".experts." not in stored or not is_known:
                        raise _build_error(f"{stored}: this is not a known name for expert weights")
                    for candidate in PARTS[name] if match else ():
                        assert match is not None
                        if match[2] in STORED_AS[candidate][: 2 if name == GATE_UP else None]:
                            names[int(match[1]), candidate] = stored.removesuffix(".weight")
            self._expert_names[experts_path] = names
        return self._expert_names[experts_path].get((index, part), f"{experts_path}.{index}.{part}")

    def _find_stored_tensors(self, parameter: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a model parameter, and the checkpoint tensors that store it (meta tensors by name)."""
        try:
            weight = self._model.get_parameter(parameter)
        except AttributeError as error:
            raise UserError(
                f"{parameter}: is not in the base model; pass the adapter's original base model with --base-model"
            ) from error
        empty = torch.empty(weight.shape, device="meta")
        try:
            return weight, self._revert(self._model, {parameter: empty})
        except ValueError as error:  # the conversion also needs other parameters
            raise _build_error(f"{parameter}: this checkpoint stores it fused with other weights") from error


def _build_error(problem: str) -> UserError:
    fix = "export the merged model with --format hf"
    return UserError(f"{problem}; no inference server is known to support adapters in this layout; {fix}")
