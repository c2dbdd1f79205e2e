"""The study of training: what context-ready training costs and gains, against transformers at equal compute."""
