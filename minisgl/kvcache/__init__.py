"""The KV pool on the device."""
