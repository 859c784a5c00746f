"""AscendCL on the host: the libraries that the torch_npu wheel loads, on a machine without CANN."""
