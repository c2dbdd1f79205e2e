"""The fixed point by iteration."""
