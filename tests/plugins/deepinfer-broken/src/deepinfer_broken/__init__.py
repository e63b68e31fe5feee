"""Fails when imported."""

raise ImportError("libxpu.so.7: cannot open shared object file")
