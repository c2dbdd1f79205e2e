"""The model: backbone, correction, recurrence, state, cost."""
