"""The fused backend: kernels compiled by numba. Nothing outside of this folder imports numba or llvmlite."""
