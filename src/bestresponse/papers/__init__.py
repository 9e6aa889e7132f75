"""Real data sets, and the papers' experiments."""
