"""Triton kernels. Imported only where they are launched: on a GPU, or under the interpreter (TRITON_INTERPRET=1)."""
