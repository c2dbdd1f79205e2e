"""Exported models: the GGUF file format, and the engine that runs such a file on the CPU without torch.

May import whatever infer may import.
"""
