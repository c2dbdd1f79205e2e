"""Diagnostics and bounds: the theory of the paper as code."""
