"""Blocks of a model, made of ops."""
