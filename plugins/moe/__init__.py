"""The built-in MoE backends (group `moe`), one file each."""
