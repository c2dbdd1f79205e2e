"""What is measured on a model: perplexity, contraction, the bounds of the paper, exactness.

May import data, solve and model.
"""
