"""L3: named byte strings in an external store that instances share."""
