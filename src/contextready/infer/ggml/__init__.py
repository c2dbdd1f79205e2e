"""Exported models: one GGUF file, and the engine that runs it on the CPU without torch.

May import what infer may.
"""
