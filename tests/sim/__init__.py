"""The simulated device: Ascend C on the host, and the ACL libraries that torch_npu loads."""
