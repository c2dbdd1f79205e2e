"""Pointer chasing, the paper's task that measures effective depth: the task, its scores, tables and plots.

May import train, infer, evaluate, runs and the packages below them. It is registered as a task that runs can learn.
"""
