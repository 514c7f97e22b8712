"""Plugins that find models in formats of the group quantization. They import no torch: every process loads them."""
