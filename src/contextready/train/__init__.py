"""The training loop and what it needs: the objective, schedules, processes, checkpoints written and resumed, plans.

May import runs and what is under it; not infer or evaluate.
"""
