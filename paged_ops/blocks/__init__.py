"""Which request owns which block of the pool: plain Python, no torch."""
