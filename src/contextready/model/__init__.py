"""The model: backbone, correction, recurrence, state, and what they cost.

Imports only torch, numpy and the modules beside the folders that need no settings (errors, files).
"""
