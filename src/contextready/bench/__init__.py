"""How fast models generate, beside other programs and what the memory allows.

May import infer, runs and what is under them; not hf or pointer.
"""
