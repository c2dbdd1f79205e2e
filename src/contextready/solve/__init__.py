"""Solvers for the fixed point: parallel passes, sweeps, prompt reading, and gradients for training.

This package may import `model`.
"""
