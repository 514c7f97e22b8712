"""The built-in FP8 products (group `fp8_gemm`), one file each."""
