"""From text to batches: corpora, tokenizer, shards."""
