"""Pools of KV bytes and the copies between them. Torch starts here."""
