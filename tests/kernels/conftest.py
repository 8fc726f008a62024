"""Triton kernels run in Triton's interpreter if there is no GPU."""

from support.kernels.interpreted_triton import interpret_without_gpu

interpret_without_gpu()
