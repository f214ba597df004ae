"""Metrics, timelines."""
