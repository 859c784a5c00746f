"""Paged attention on an Ascend NPU: the same calls, with ``device="npu"``.

Needs torch_npu, CANN and the NPU kernels of this package. Prompts of two requests, then a token
more of each; the outputs are compared with those of the CPU, which get the same numbers.
"""

import torch
import torch_npu  # noqa: F401  (makes "npu" a device)

from paged_ops import PagedAttention

torch.manual_seed(0)


def run(device, prompts, tokens):
    """Attend from two prompts, then from one more token each; return all outputs on the CPU."""
    attention = PagedAttention(
        num_heads=8, head_dim=64, num_kv_heads=2, num_blocks=64, dtype=torch.float16, device=device
    )
    attention.allocate("ann", 7)
    attention.allocate("bob", 25)
    prompts, tokens = [x.to(device) for x in prompts], [x.to(device) for x in tokens]
    first = attention(*prompts, ["ann", "bob"], query_lens=[7, 25])
    second = attention(*tokens, ["ann", "bob"])
    attention.free("bob")
    return torch.cat([first, second]).cpu()


def rows(num_tokens):
    return [torch.randn(num_tokens, heads, 64).half() for heads in (8, 2, 2)]


inputs = rows(32), rows(2)
output, expected = run("npu", *inputs), run("cpu", *inputs)
print(f"{len(output)} rows on {torch.npu.get_device_name()}")
print(f"the largest difference from the CPU is {(output - expected).abs().max():.1e}")
torch.testing.assert_close(output, expected, atol=2e-3, rtol=2e-3)
