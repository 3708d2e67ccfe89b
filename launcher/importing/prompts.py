"""Prompts and chat templates that other trainers refer to by name."""

ALPACA_HEAD = "Below is an instruction that describes a task"
ALPACA_PAIRED = ", paired with an input that provides further context"
ALPACA_TAIL = ". Write a response that appropriately completes the request."

# Style of Stanford Alpaca's prompt -> (system text, turn with an input, turn without).
STYLES = {
    "instruct": (
        "{system}\n\n",
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "chat": (
        "SYSTEM: {system}\n",
        "USER: {instruction}\n{input}\nASSISTANT:",
        "USER: {instruction}\nASSISTANT:",
    ),
    "chatml": (
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": (
        "<|system|>\n{system}<|end|>\n",
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    ),
}


def alpaca(style: str) -> tuple[str, str]:
    """Return the prompt of Stanford Alpaca for records with an input, and for those without."""
    system, with_input, without = STYLES[style]
    return (
        system.replace("{system}", ALPACA_HEAD + ALPACA_PAIRED + ALPACA_TAIL) + with_input,
        system.replace("{system}", ALPACA_HEAD + ALPACA_TAIL) + without,
    )


def _turns(opening: str, role_end: str, closing: str, *, begin: str = "") -> str:
    """Return a template that writes every turn as a role between marks, its text, and a closing mark."""
    return (
        f"{begin}{{% for message in messages %}}{{{{ '{opening}' + message['role'] + '{role_end}' + "
        f"message['content'] | trim + '{closing}' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{opening}assistant{role_end}' }}}}{{% endif %}}"
    )


_SYSTEM_IN_USER = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] | trim + '\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}" + _SYSTEM_IN_USER + "{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' + "
    "(first if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# By their names in Axolotl and LLaMA-Factory; for other names the tokenizer's own template is used.
CHAT_TEMPLATES = {
    "chatml": _turns("<|im_start|>", "\\n", "<|im_end|>\\n"),
    "llama3": _turns("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>", begin="{{ bos_token }}"),
    "gemma": _GEMMA,
    "gemma3": _GEMMA,
    "phi_3": _turns("<|", "|>\\n", "<|end|>\\n"),
    "phi_35": _turns("<|", "|>\\n", "<|end|>\\n"),
}
