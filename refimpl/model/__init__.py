"""A real decoder over paged KV: its arithmetic, checkpoints, tokenizers and sampling."""
