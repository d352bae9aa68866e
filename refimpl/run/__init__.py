"""Brain, hands and clock put together."""
