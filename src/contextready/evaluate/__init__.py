"""What reads runs: evaluations, learning curves, tasks of lm-evaluation-harness.

May import runs and what is under it; not train or infer.
"""
