"""The element types that kernels are compiled for."""

import torch

ELEMS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # the macro ELEM of `kernels/cuda/types.cuh`
VECTOR_BYTES = 16  # the widest load and store of a thread
