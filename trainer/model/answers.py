"""One prompt answered by the model as it stands, to see what training changed."""

from typing import Any

import torch
from jinja2 import TemplateError

from trainer.config import UserError
from trainer.engine.layer_gather.shards import layer_shards_of
from trainer.engine.protocol import Engine
from trainer.ranks.progress import phase

_PROBE = "Sentinel"


@phase("generate")
@torch.no_grad()
def answer_prompt(engine: Engine, tokenizer: Any, prompt: str, max_new_tokens: int, system: str | None = None) -> str:
    """The greedy answer to a user message (or the continuation, without a chat template); every rank must call it."""
    input_ids = prompt_ids(tokenizer, prompt, system).to(engine.device)
    model = engine.module
    was_training = model.training
    model.eval()
    generated = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        use_cache=True,
        eos_token_id=stop_tokens(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        # Under ZeRO-3 every forward pass gathers: no rank may stop generating before the others.
        synced_gpus=engine.zero_optimization_stage() == 3 or layer_shards_of(model) is not None,
    )
    model.train(was_training)
    return str(tokenizer.decode(generated[0, input_ids.shape[1] :], skip_special_tokens=True))


def prompt_ids(tokenizer: Any, prompt: str, system: str | None) -> torch.Tensor:
    """Token ids [1, T] of a conversation up to where the assistant takes over."""
    if not tokenizer.chat_template:
        text = prompt if system is None else f"{system}\n\n{prompt}"
        return torch.as_tensor(tokenizer(text, return_tensors="pt")["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return conversation_ids(tokenizer, messages)


def conversation_ids(tokenizer: Any, messages: list[dict[str, str]]) -> torch.Tensor:
    """Token ids [1, T] of turns through the chat template. Raises UserError where the template refuses them."""
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as error:
        raise UserError(f"the run's chat template refuses the conversation ({error})") from None
    return torch.as_tensor(encoded["input_ids"])


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: those of the model, the tokenizer's, and the one the chat template puts after a turn.

    A base model's end-of-text token is not what an adapter trained on conversations ends its turns with.
    """
    own = model.generation_config.eos_token_id
    stops = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id}
    if tokenizer.chat_template:
        stops.add(end_of_turn(tokenizer))
    return sorted(token for token in stops if token is not None)


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that the chat template puts after an answer; None if it puts text there, or nothing."""
    turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
    tail = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(_PROBE)[2].strip()
    after = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((token for token in after[:1] if token in tokenizer.added_tokens_decoder), None)
