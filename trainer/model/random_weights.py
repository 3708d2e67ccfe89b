"""Build models with a published shape and random weights (`base_model: random:SHAPE`), directly on the device.

Speed and memory do not depend on the values, so both can be measured without a download. The same name gives the same
weights on the same type of device.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from trainer.config import UserError
from trainer.model.model_kind import SCORE_WEIGHT
from trainer.model.mxfp4 import BLOCK as MXFP4_BLOCK
from trainer.model.published_shapes import parse_shape_settings
from trainer.model.stored_layout import BLOCKS, SCALES, StoredTensors
from trainer.parallel.engine.linear_layers import find_expert_weights

STANDARD_DEVIATION = 0.02
UNDECLARED = ("rope_theta", "rope_scaling", "head_dim")  # read by models, but declared by no configuration class
MXFP4_EXPONENT = 120  # 2^-7; times 2.9, the root mean square of the 16 values, about 0.02
MAX_VALUE, MAX_LAYERS = 10_000_000, 1000  # limits for the settings in `random:SHAPE,key=value`
END, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_random_config(base_model: str) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    settings = parse_shape_settings(base_model)
    model_type = settings.pop("model_type")
    default_config = AutoConfig.for_model(model_type)
    published = parse_shape_settings(base_model.split(",")[0])
    unknown = [key for key in settings if not hasattr(default_config, key) and key not in (*UNDECLARED, *published)]
    if unknown:
        raise UserError(
            f"base_model={base_model}: {unknown[0]} is not a setting of {model_type} configurations; remove it"
        )
    for key, value in settings.items():
        if key not in published or published[key] != value:
            settings[key] = _check_value(base_model, key, value, default_config)
    _resize_layer_lists(settings, published)
    # Use the ids of the byte tokenizer, which has only 259 tokens.
    ids = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    try:
        config = AutoConfig.for_model(model_type, **(settings | ids))
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, StrictDataclassError) as error:
        # Strict dataclasses give the reason in the last line.
        reason = str(error).splitlines()[-1].strip(" .").removeprefix("ValueError: ").removeprefix("TypeError: ")
        raise UserError(f"base_model={base_model}: {reason}; change that setting") from None
    heads, groups = getattr(config, "num_attention_heads", 1), getattr(config, "num_key_value_heads", None) or 1
    if heads % groups:
        raise UserError(f"base_model={base_model}: num_key_value_heads={groups} must divide {heads} heads; use 1")
    config.name_or_path = base_model
    return config


def _resize_layer_lists(settings: dict[str, Any], published: dict[str, Any]) -> None:
    """Resize per-layer lists, such as `layer_types`, if only the number of layers was changed."""
    before, layers = published.get("num_hidden_layers"), settings.get("num_hidden_layers")
    for key, value in published.items():
        if isinstance(value, list) and len(value) == before != layers and settings[key] == value:
            settings[key] = [value[index % len(value)] for index in range(int(layers or 0))]


def _check_value(base_model: str, key: str, value: Any, default_config: Any) -> Any:
    """Return a setting's value, with whole floats converted to int. Raises UserError for a wrong type or range."""
    default = getattr(default_config, key, 1e4)  # the undeclared settings are numbers
    if isinstance(default, bool) or not isinstance(default, (int, float)) or key == "rope_scaling":
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"base_model={base_model}: {key}={value} must be a number, such as {default}")
    if isinstance(default, int):
        limit = MAX_LAYERS if key == "num_hidden_layers" else MAX_VALUE
        if not 1 <= value <= limit or value != int(value):
            raise UserError(f"base_model={base_model}: {key}={value} must be a whole number from 1 to {limit:,}")
        return int(value)
    return value


def build_byte_tokenizer() -> Any:
    """Build a tokenizer with 259 tokens (256 bytes and three special tokens) and a ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special_tokens = [END, START_OF_TURN, END_OF_TURN]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special_tokens, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


class RandomTensors:
    """Implements `StoredTensors` with random values: draws each parameter of `model` when it is read.

    Matrices are drawn from N(0, 0.02^2), the usual initialization; norm weights are one, biases zero. The name of each
    tensor (and the expert's index) seeds its values, so the order of reading does not matter.
    """

    def __init__(
        self, base_model: str, model: torch.nn.Module, device: torch.device, *, in_mxfp4: bool = False
    ) -> None:
        """Prepare the tensors of `model`; with `in_mxfp4`, experts are stored as blocks and scales, as in gpt-oss."""
        self._base_model = base_model
        self._device = device
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._packed: dict[str, tuple[int, ...]] = {}
        for path, module in model.named_modules() if in_mxfp4 else ():
            for name, experts in find_expert_weights(module).items():
                count, width, out = experts.shape
                del self._parameters[f"{path}.{name}"]
                self._packed[f"{path}.{name}{BLOCKS}"] = (count, out, width // MXFP4_BLOCK, MXFP4_BLOCK // 2)
                self._packed[f"{path}.{name}{SCALES}"] = (count, out, width // MXFP4_BLOCK)

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()} | self._packed

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        if name in self._packed:
            count, *shape = self._packed[name]
            return torch.cat([self._draw_packed(name, expert, shape) for expert in _select_experts(count, index)])
        weight = self._parameters[name]
        if weight.dim() == 3 and ".experts." in name:
            indices = _select_experts(len(weight), index)
            return torch.cat([self._draw(f"{name} {expert}", weight[:1]) for expert in indices])
        if weight.dim() < 2:
            # "D" is the skip connection of a state-space layer.
            value = 1.0 if name.endswith((".weight", ".D")) else 0.0
            return torch.full(weight.shape, value, dtype=weight.dtype, device=self._device)
        tensor = self._draw(name, weight)
        return tensor if index is None else tensor[index : index + 1]

    def _draw_packed(self, name: str, expert: int, shape: list[int]) -> torch.Tensor:
        """Draw random codes, or return scales that give the weights a standard deviation of about 0.02."""
        if name.endswith(SCALES):
            return torch.full((1, *shape), MXFP4_EXPONENT, dtype=torch.uint8, device=self._device)
        generator = self._build_generator(f"{name} {expert}")
        return torch.randint(256, (1, *shape), generator=generator, dtype=torch.uint8, device=self._device)

    def _build_generator(self, name: str) -> torch.Generator:
        seed = int.from_bytes(hashlib.sha256(f"{self._base_model} {name}".encode()).digest()[:6], "big")
        return torch.Generator(self._device).manual_seed(seed)

    def _draw(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        drawn = torch.empty(weight.shape, dtype=weight.dtype, device=self._device)
        return drawn.normal_(0.0, STANDARD_DEVIATION, generator=self._build_generator(name))


def init_score_head(model_config: Any) -> torch.Tensor:
    """Return a random score head [1, H] in fp32, with the same values in every run and on every rank."""
    drawn = torch.empty(1, model_config.hidden_size)
    return drawn.normal_(0.0, STANDARD_DEVIATION, generator=torch.Generator().manual_seed(0))


class TensorsWithScore:
    """Adds a new score head to the tensors of a checkpoint if it has none."""

    def __init__(self, stored: StoredTensors, model_config: Any) -> None:
        self.stored, self._config = stored, model_config

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        return {SCORE_WEIGHT: (1, self._config.hidden_size)} | self.stored.read_shapes()

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        is_new = name == SCORE_WEIGHT and name not in self.stored.read_shapes()
        return init_score_head(self._config) if is_new else self.stored.read(name, index)


def _select_experts(count: int, index: int | None) -> Sequence[int]:
    return range(count) if index is None else [index]
