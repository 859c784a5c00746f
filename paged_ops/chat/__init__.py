"""Conversations with a language model of transformers, several at once, through the paged cache."""
