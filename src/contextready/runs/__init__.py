"""Training runs: their settings and recipes, the models they train, and their checkpoints and metrics on disk.

It may import data, model and the top-level modules, but not measure, train, infer, evaluate or anything above.
"""
