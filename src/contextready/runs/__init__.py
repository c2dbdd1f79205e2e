"""What a run is: its settings and recipes, its checkpoints and metrics on disk, the models it is about.

May import data, model and the modules beside the folders; not measure, train, infer, evaluate or what is above.
"""
