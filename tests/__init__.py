"""The tests of paged_ops, and the cases and checks that they share."""
