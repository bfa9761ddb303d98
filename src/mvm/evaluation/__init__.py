"""Evaluation: metrics and reports."""
