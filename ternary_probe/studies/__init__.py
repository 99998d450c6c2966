"""Studies combine perturbing and measuring into records."""
