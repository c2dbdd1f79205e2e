"""Generation: engines that stream, sampling, text as it comes, sessions.

May import runs and what is under it; not train or evaluate. Exported models (`infer/ggml`) run without torch.
"""
