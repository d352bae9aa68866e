"""The decisions of one serving instance, pure."""
