"""Measurements of this library on this machine; `benchmarks/` in the repository adds the peers."""
