"""Routing policies: each file is one choice of ``routing=``."""
