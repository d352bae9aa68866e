"""Decisions that span instances, pure."""
