"""Tests for several ranks at once, under torchrun; tests/test_distributed.py starts them."""
