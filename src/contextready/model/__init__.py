"""The model: backbone, correction, recurrence, state, and their cost.

This package imports only torch, numpy and the top-level modules `errors` and `files`.
"""
