"""State tracking: tasks that ask for a state after every symbol, their scores by length, tables and plots.

May import train, infer, evaluate, runs and the packages below them. Its tasks are registered as tasks that runs can
learn.
"""
