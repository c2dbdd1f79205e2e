"""Measurements on a model: perplexity, contraction, the paper's bounds, and exactness.

This package may import `data`, `solve` and `model`.
"""
