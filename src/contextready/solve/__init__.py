"""The fixed point: parallel passes, sweeps, reading prompts, and the gradients of training.

May import model.
"""
