"""Scenario strings and traces, as requests."""
