"""Metrics: pure functions of features, and the networks that compute features."""
