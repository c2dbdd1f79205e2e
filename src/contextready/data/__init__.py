"""Data: corpora, the tokenizer, token shards and batches.

This package may import the top-level modules of contextready, and nothing about models.
"""
