"""Evaluation: zero-shot classification and retrieval."""
