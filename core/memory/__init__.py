"""Host memory that GPUs read, tables that live compressed in it, and caches of their rows."""
