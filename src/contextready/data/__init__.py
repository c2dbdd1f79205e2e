"""From text to batches: corpora, tokenizer, shards.

May import the modules beside the folders; it knows nothing of models.
"""
