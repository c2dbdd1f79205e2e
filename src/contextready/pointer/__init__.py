"""Pointer chasing, the paper's task on which depth can be counted: the task, its scores, tables and pictures.

May import everything below: train, infer, evaluate, runs and what is under them; it registers itself as a task of runs.
"""
