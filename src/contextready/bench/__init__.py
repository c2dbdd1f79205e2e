"""Benchmarks: how fast models generate, compared with other programs and with the memory bandwidth.

May import infer, runs and the packages below them, but not hf or pointer.
"""
