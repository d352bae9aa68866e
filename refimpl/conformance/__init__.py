"""The kit that certifies a storage backend: rules, and a verdict with a reason for each."""
