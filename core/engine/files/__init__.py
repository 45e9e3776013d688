"""Files: written whole or not at all, the same bytes for the same content, and locks on them."""
