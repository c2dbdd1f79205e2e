"""The training loop and what it needs: the objective, schedules, distributed processes, checkpointing and plans.

It may import runs and the packages below it, but not infer or evaluate.
"""
