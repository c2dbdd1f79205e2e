"""Reads finished runs: evaluations, learning curves, and tasks from lm-evaluation-harness.

May import runs and the packages below it, but not train or infer.
"""
