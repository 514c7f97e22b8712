"""The built-in plugins of the hook ``minisgl_fp8_gemm``, one file per plugin."""
