"""What torch has to know of each op beside its kernels."""
