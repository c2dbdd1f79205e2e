"""The paper's models and tables."""
