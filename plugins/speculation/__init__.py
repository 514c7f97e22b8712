"""The built-in proposers of draft tokens (hook `minisgl_proposer`), one file each."""
