"""Model runner of one rank: KV pool, page table, forward pass, graphs and sampling."""
