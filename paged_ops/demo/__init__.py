"""A small language model that answers several prompts at once through the paged cache."""
