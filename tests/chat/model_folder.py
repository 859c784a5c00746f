"""The demo's model as one that chats: its words mean nothing, but its tokens are its own."""

from __future__ import annotations

from pathlib import Path

from paged_ops.demo.llama import load_llama, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(folder: Path) -> Path:
    """Save it as a folder of transformers with a chat template."""
    load_llama().save_pretrained(folder)
    tokenizer = load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
