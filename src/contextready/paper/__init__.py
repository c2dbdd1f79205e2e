"""The paper as data: its tables with the printed figures, its claims, and what the author's public notebooks add.

May import runs, for the names and shapes of the paper's models, and the packages below it.
"""
