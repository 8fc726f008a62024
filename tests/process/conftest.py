"""Without a GPU, Triton kernels run in Triton's interpreter."""

from support.kernels.interpreted_triton import interpret_without_gpu

interpret_without_gpu()
