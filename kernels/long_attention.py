"""Causal grouped-query attention of one long prompt by cuDNN, whose kernels use what Hopper GPUs have; torch's FlashAttention-2
does not.

It is for the first tokens of a row alone: causal means here that the first query meets the first key, so a chunk behind cached
tokens is not for it (`kernels/chunk_attention.py`). Which prompts are worth its plan is for `engine/graph/long_prompts.py`.
"""

from __future__ import annotations

import torch

# Measured on an H200, 28 heads and 4 of keys and values, us by FlashAttention / by cuDNN: 512 tokens 34 / 38, 1024 56 / 47,
# 2048 148 / 82, 4096 461 / 240. Below so many tokens the gain is not more than filling up costs.
LEAST_TOKENS = 1536
TOKENS_MULTIPLE = 256  # cuDNN plans for one number of tokens, so lengths are filled up: few plans, and little padding
DTYPES, HEAD_DIMS = (torch.bfloat16, torch.float16), (64, 128)
LEAST_CAPABILITY = (9, 0)  # Hopper
# 9.15.1, from which on torch itself prefers cuDNN's attention on such GPUs: earlier ones had faults at some lengths
# (`check_prefer_cudnn_attention` in its sdp_utils.cpp). torch 2.11 for CUDA 13 brings 9.19.
LEAST_CUDNN = 91501


def takes_long(x: torch.Tensor) -> bool:
    """Whether cuDNN attends heads like those of `x` `[..., head_dim]`: by their dtype and size, the GPU they are on, and the
    cuDNN that torch finds. *Raises* `RuntimeError` if that is not one that torch can use."""
    if not x.is_cuda or x.dtype not in DTYPES or x.shape[-1] not in HEAD_DIMS:
        return False
    if torch.cuda.get_device_capability(x.device) < LEAST_CAPABILITY or not torch.backends.cudnn.is_available():
        return False
    return torch.backends.cudnn.version() >= LEAST_CUDNN


def padded_length(num_tokens: int) -> int:
    """The tokens for which cuDNN plans when it attends `num_tokens`."""
    return -(-num_tokens // TOKENS_MULTIPLE) * TOKENS_MULTIPLE


def attend_long(qkv: torch.Tensor, num_kv: int) -> torch.Tensor:
    """Attend the first tokens of a row, each of which sees itself and those before it: `[tokens, local_q_heads, head_dim]`,
    contiguous.

    `qkv` `[tokens, local_q_heads + 2 * num_kv, head_dim]`, contiguous, of heads for which `takes_long`; it is left as it is.
    Scores are scaled by head_dim ** -0.5. *Numbers*: fp32 accumulation. *Cost*: a copy of `qkv` if its tokens have to be filled
    up. The first call of a padded length, in a thread and for so many heads, makes a plan, which takes the host about 65 ms.
    *Order*: so that call is not to be inside of a capture.
    """
    num_tokens = qkv.shape[0]
    # Laid out alike for every length, since a plan is of strides as well: `[1, heads, tokens, head_dim]`.
    heads = _filled_up(qkv)[None].transpose(1, 2)
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv, num_kv, num_kv), dim=1)
    # The result lies token by token, as the queries do.
    return cudnn_attention(q, k, v)[0, :, :num_tokens].transpose(0, 1)


def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[1, heads, tokens, head_dim]`, laid out as `q` is. Not `scaled_dot_product_attention`, which may choose another."""
    is_log_sum_wanted, dropout, is_causal = False, 0.0, True
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, is_log_sum_wanted, dropout, is_causal)[0]


def _filled_up(qkv: torch.Tensor) -> torch.Tensor:
    """With padding behind, which no token sees; of zeros, because a weight of 0 does not silence a NaN."""
    num_tokens, length = qkv.shape[0], padded_length(qkv.shape[0])
    if length == num_tokens:
        return qkv
    padded = qkv.new_empty(length, *qkv.shape[1:])
    padded[:num_tokens].copy_(qkv)
    padded[num_tokens:].zero_()
    return padded
