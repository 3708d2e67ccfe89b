"""Read and check the settings of a PEFT LoRA adapter (`adapter_config.json`), such as at `lora.adapter_path`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trainer.config.errors import UserError
from trainer.config.files import UnreadableFileError, read_json
from trainer.config.sections import RunConfig
from trainer.config.types import check_regex

SETTINGS_FILE = "adapter_config.json"
PROJECTORS = ("merger", "deepstack_merger_list", "multi_modal_projector", "connector", "embed_vision", "projector")
"""Names of the modules that map image features to a language model's embeddings."""
INITS = "(?i)^(gaussian|olora|mica|pissa(_niter_[0-9]+)?|corda|loftq|eva|orthogonal|lora_ga)$"
Pattern = Annotated[str, AfterValidator(check_regex)]
Names = list[str] | Pattern | None
Number = Annotated[float, Field(allow_inf_nan=False)] | int
Rank = Annotated[int, Field(gt=0)]


class AdapterSettings(BaseModel):
    """Validates the keys that PEFT and zerolora rely on; other keys are not checked."""

    model_config = ConfigDict(extra="allow", strict=True)

    peft_type: Literal["LORA"]
    r: Rank
    lora_alpha: Annotated[Number, Field(gt=0)]
    base_model_name_or_path: str | None = None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    lora_bias: bool = False
    init_lora_weights: bool | Annotated[str, Field(pattern=INITS)] | None = True
    bias: Literal["none", "all", "lora_only"] = "none"
    target_modules: Names = None
    exclude_modules: Names = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: Names = None
    layer_replication: None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    rank_pattern: dict[Pattern, Rank] | None = None
    alpha_pattern: dict[Pattern, Number] | None = None
    # Variants of LoRA with another forward pass.
    alora_invocation_tokens: None = None
    arrow_config: None = None
    kasa_config: None = None
    monteclora_config: None = None
    use_bdlora: None = None
    use_qalora: Literal[False] = False
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None


def read_adapter_settings(folder: Path) -> dict[str, Any]:
    """Return the LoRA adapter's settings in a folder, without defaults. Raises UserError if they are unusable."""
    try:
        settings: AdapterSettings = read_json(folder / SETTINGS_FILE, AdapterSettings)
    except FileNotFoundError:
        raise UserError(f"{folder}: has no {SETTINGS_FILE}; use the folder of a PEFT adapter") from None
    return settings.model_dump(exclude_unset=True)


def list_fully_trained_modules(config: RunConfig) -> tuple[str, ...]:
    configured = config.lora.modules_to_save + (PROJECTORS if config.lora.image_parts == "projector" else ())
    return configured or tuple(read_initial_adapter_settings(config).get("modules_to_save") or ())


def read_initial_adapter_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the adapter at lora.adapter_path; an empty dict if it is unset or not a local folder."""
    path = config.lora.adapter_path
    try:
        return read_adapter_settings(Path(path)) if path and Path(path, SETTINGS_FILE).is_file() else {}
    except UnreadableFileError as error:
        raise UserError(f"lora.adapter_path={path}: {SETTINGS_FILE}: {error.problem}; {error.fix}") from None
