"""Generation: engines, sampling, incremental text and sessions.

May import `runs` and the packages below it, but not `train` or `evaluate`. Exported files (`infer/ggml`) run without
torch.
"""
