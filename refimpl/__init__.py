"""The reference engine for hierarchical KV caching."""
