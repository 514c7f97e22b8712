"""The model runner: pool, page table, forward pass, sampling."""
