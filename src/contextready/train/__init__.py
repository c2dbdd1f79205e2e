"""The training loop and what it needs: recipes, schedules, checkpoints, progress."""
