"""Format prompts as in training, and generate answers to them."""

from typing import Any

import torch

from trainer.config import DatasetSection, UserError
from trainer.data.chat_template import ChatTemplate
from trainer.data.conversations import load_chat_template, render_prompt
from trainer.data.prompt_files import Prompt
from trainer.data.records import Conversation
from trainer.data.tokens import detect_bos_token_id
from trainer.data.vision import PromptImages
from trainer.model.base import get_context_length
from trainer.parallel.engine.layer_gather.shards import get_layer_shards
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.progress import phase

GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
"""Arguments to `generate` for greedy decoding, which override the model's generation settings."""


@phase("generate")
def generate_greedy_answers(engine: Engine, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
    """Generate answers to a batch of tokenized prompts by greedy decoding (collective)."""
    model, options = engine.module, {**GREEDY, "synced_gpus": needs_synced_passes(engine)}
    was_training = model.training
    model.eval()
    answers = generate_texts(model, tokenizer, prompts, engine.device, max_new_tokens, **options)
    model.train(was_training)
    return answers


@torch.no_grad()
def generate_texts(
    model: Any, tokenizer: Any, prompts: list[list[int]], device: torch.device, max_new_tokens: int, **options: Any
) -> list[str]:
    """Generate continuations of tokenized prompts in one left-padded batch, up to the model's context length."""
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(device)
    length, context = padded["input_ids"].shape[1], get_context_length(model.config)
    try:
        generated = model.generate(
            input_ids=padded["input_ids"],
            attention_mask=padded["attention_mask"],
            max_new_tokens=max_new_tokens if context is None else max(1, min(max_new_tokens, context - length)),
            use_cache=True,
            eos_token_id=find_stop_tokens(model, tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            num_return_sequences=1,
            return_dict_in_generate=False,
            tokenizer=tokenizer,  # for stop strings
            **options,
        )
    except (ValueError, TypeError, ImportError) as error:  # transformers checks many keys only here
        usual = ("token_id", "_version", "_config", "use_cache", "_attentions", "_states")
        if all(name.endswith(usual) for name in model.generation_config.to_diff_dict()):
            raise
        raise UserError(f"base_model={model.name_or_path}: generation_config.json: {error}; fix this key") from error
    return tokenizer.batch_decode(generated[:, length:], skip_special_tokens=True)


def needs_synced_passes(engine: Engine) -> bool:
    """Return whether forward passes gather weights, which forces all ranks to generate the same number of tokens."""
    return engine.zero_optimization_stage() == 3 or get_layer_shards(engine.module) is not None


def encode_prompt(
    tokenizer: Any, section: DatasetSection, prompt: Prompt, text_format: str | None, images: PromptImages | None = None
) -> torch.Tensor:
    """Return the token ids [1, T] of a prompt, formatted as in training up to the start of the answer.

    `text_format` formats plain-text prompts (see records.find_prompt_format). Without it, and for lists of turns, the
    prompt is rendered as a conversation. Raises UserError if the prompt is empty or the template rejects it.
    """
    if isinstance(prompt, Conversation):
        rendered, first_token = render_prompt(tokenizer, section, prompt.messages, prompt.tools), None
    elif isinstance(prompt, list) or text_format is None:
        turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        rendered, first_token = render_prompt(tokenizer, section, turns), None
    else:
        system = f"{section.system_prompt}\n\n" if section.system_prompt else ""
        rendered, first_token = text_format.format(system=system, prompt=prompt), detect_bos_token_id(tokenizer)
    rendered = images.insert(rendered) if images is not None else rendered
    ids: list[int] = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise UserError("the prompt is empty; write a prompt")
    return torch.tensor([ids if first_token is None or ids[0] == first_token else [first_token, *ids]])


def check_prompt_length(ids: torch.Tensor, context_length: int | None) -> None:
    """Raise UserError if a prompt [1, T] leaves no room for an answer."""
    if context_length is not None and (count := ids.shape[1]) >= context_length:
        raise UserError(f"the prompt has {count} tokens, but the context holds {context_length}; shorten it")


def find_stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the stop tokens of the model, the tokenizer and the chat template.

    A model trained on conversations ends its turns with the template's token, not with the end-of-text token.
    """
    model_stops = model.generation_config.eos_token_id
    tokens = {*(model_stops if isinstance(model_stops, list) else [model_stops]), tokenizer.eos_token_id}
    if tokenizer.chat_template:
        tokens.add(find_end_of_turn(tokenizer))
    return sorted(token for token in tokens if token is not None)


def find_end_of_turn(tokenizer: Any) -> int | None:
    """Return the id of the token after an answer in the chat template (possibly the next turn's start), or None."""
    source = load_chat_template(tokenizer, None)
    token = ChatTemplate(tokenizer, source, {}).answer_end_tokens[False].strip() if source else ""
    return int(tokenizer.convert_tokens_to_ids(token)) if token else None
