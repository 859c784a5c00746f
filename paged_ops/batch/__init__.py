"""From requests to the index tensors that the ops take."""
